"""Looking at a job from outside: what it will cost (`plan`). Imports nothing of the rest of the package."""

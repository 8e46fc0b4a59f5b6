"""Measurements: a file a question, run as `python -m benchmarks.NAME` from the root of the repository."""

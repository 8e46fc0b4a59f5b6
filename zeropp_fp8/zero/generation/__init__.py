"""Generation inside an engine that trains."""

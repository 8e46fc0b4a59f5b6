"""After how long something counts as hanging: no test's outcome depends on how busy the machine is."""

HANG = 900  # seconds; the longest of what it guards takes 20 where nothing else runs

"""Objects on a disk: a log of segments."""

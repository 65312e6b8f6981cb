"""Objects on a kvtide server."""

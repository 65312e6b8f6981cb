"""Objects in memory: the host's, or a device's that an engine hands in."""

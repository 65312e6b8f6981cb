"""Judges of quality: what the model says of the cache that was built."""

"""Baselines: the codecs that papers describe, CacheGen and chunkwise quantising, and the fit of their profiles."""

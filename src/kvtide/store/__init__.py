"""The cache that engines use: match, load, store."""

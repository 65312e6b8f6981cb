"""The cache server: tiers behind HTTP."""

"""Fitting profiles to a model: what moves in its cache, and what the model says of the outcome."""

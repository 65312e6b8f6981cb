"""Rotary position embedding: keys turned back to before it, for every family of models that is known."""

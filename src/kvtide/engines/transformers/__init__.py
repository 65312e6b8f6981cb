"""Hugging Face transformers: `attach` gives a model a cache."""

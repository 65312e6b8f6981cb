"""Swapping of an engine's pages, plain and encoded on a device: what benches compare."""

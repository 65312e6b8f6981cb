"""Streaming, decided without I/O: how fast the link is, what to ask for next."""

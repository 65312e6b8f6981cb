"""Connections of the server: heads, bodies, and how much of both anyone may hold."""

"""Replays of public traces and of the report's experiments through the real index, on a clock of their own."""

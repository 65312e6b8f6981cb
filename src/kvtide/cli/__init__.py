"""The `kvtide` command."""

from kvtide.cli.app import main

__all__ = ["main"]

"""The `kvtide-lab` command."""

from kvtide_lab.cli.app import main

__all__ = ["main"]

"""The `kvtide` command."""

from kvtide.cli.app import main, run

__all__ = ["main", "run"]

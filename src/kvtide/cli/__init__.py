"""The `kvtide` command."""

from kvtide.cli.app import main, run, version_option

__all__ = ["main", "run", "version_option"]

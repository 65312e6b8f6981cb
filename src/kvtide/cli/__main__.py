"""`python -m kvtide.cli` is the `kvtide` command."""

from kvtide.cli.app import main

main()

"""`python -m kvtide_lab.cli`."""

from kvtide_lab.cli import main

main()

"""`python -m mcpc` is the `mcpc` command."""

from mcpc.cli.app import main

main()

"""The `mcpc` command: argument parsing, progress, rendering and exit codes. One module per command."""

"""One module per command: plain functions that wire the layers below and return a `Report`."""

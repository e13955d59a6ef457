"""One module per command: wires export, backends, verification and packages together."""

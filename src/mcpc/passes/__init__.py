"""Rewrites of component graphs. `registry.PASSES` is the table of them all."""

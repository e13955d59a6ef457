"""Rewrites of traced graphs, named by templates: the same numbers from fewer nodes."""

"""Recipe, target and template files as validated objects: all errors at once, each with its place."""

"""Match a checkpoint with a template and make an export plan. Data first: a template is a YAML file."""

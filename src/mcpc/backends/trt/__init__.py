"""TensorRT-RTX: lower, check, build in a child process, read the plan back. Needs no GPU."""

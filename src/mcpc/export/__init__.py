"""PyTorch to component graphs, without loading a weight; and the PyTorch reference that packages are compared with.

Only this layer (and `training`) imports torch and transformers.
"""

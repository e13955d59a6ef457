"""mcpc: an offline compiler for multimodal models."""

__version__ = "0.1.0"

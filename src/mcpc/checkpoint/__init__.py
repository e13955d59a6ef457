"""A Hugging Face checkpoint folder as lazy tensors. Safetensors only; no pickle, no remote code, no network."""

from mcpc.checkpoint.checkpoint import Checkpoint

__all__ = ["Checkpoint"]

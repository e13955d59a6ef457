"""Bytes on disk: safetensors headers and streams, digests, copies, and directories that appear whole or not at all."""

"""ONNX Runtime on the CPU. The only module that imports onnxruntime."""

from mcpc.backends.ort.runners import package_runners
from mcpc.backends.ort.session import OrtRunner, open_model

__all__ = ["OrtRunner", "open_model", "package_runners"]

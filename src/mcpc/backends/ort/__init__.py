"""ONNX Runtime on the CPU. The only module that imports onnxruntime."""

from mcpc.backends.ort.runners import package_runners
from mcpc.backends.ort.session import OrtRunner, open_model
from mcpc.backends.ort.streamed import StreamedRunner

__all__ = ["OrtRunner", "StreamedRunner", "open_model", "package_runners"]

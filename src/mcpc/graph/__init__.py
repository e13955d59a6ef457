"""onnx_ir helpers. `graph/io.py` is the only module that touches protobuf."""

"""Value types and contracts. No file I/O; `onnx_ir` under TYPE_CHECKING only."""

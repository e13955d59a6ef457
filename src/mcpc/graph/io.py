"""Load and save component graphs. Weights stay external: they are mapped on demand, never loaded with the graph."""

from __future__ import annotations

import ast
from pathlib import Path

import onnx
import onnx.version_converter
import onnx_ir as ir
from google.protobuf.message import DecodeError

from mcpc.errors import BadInputError, UnsupportedError
from mcpc.storage.references import weights_folder

#: The only link from a node to the module it came from; every other node metadata holds paths of the build machine.
NAME_SCOPES = "pkg.torch.onnx.name_scopes"


#: Source: onnx.proto, IR_VERSION_2024_3_25: INT4 and UINT4.
_IR_VERSION_OF_INT4 = 10


def load(path: Path) -> ir.Model:
    """Return the model of an ONNX file; external tensors resolve against its folder, or the one that it refers to.

    Raises:
        BadInputError: The file is missing, empty or not an ONNX model, or an external tensor points outside.
    """
    try:
        data = path.read_bytes()
        proto = onnx.ModelProto.FromString(data)
    except FileNotFoundError:
        raise BadInputError("no such file", where=str(path)) from None
    except DecodeError as error:
        raise BadInputError("not an ONNX model", where=str(path), got=str(error)) from None
    if not data or not proto.HasField("graph") or not proto.opset_import:
        raise BadInputError("not an ONNX model: it holds no graph", where=str(path), got=f"{len(data)} bytes")
    model = ir.serde.deserialize_model(proto)
    base = weights_folder(path.parent)
    for value in all_initializers(model):
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor):
            _check_external(tensor, base, path)
            tensor.base_dir = str(base)
    return model


def _check_external(tensor: ir.ExternalTensor, base: Path, path: Path) -> None:
    location = Path(tensor.location)
    where = f"{path}: {tensor.name}"
    if location.is_absolute() or ".." in location.parts:
        raise BadInputError("external data points outside the folder", where=where, got=str(tensor.location))
    file = base / location
    if not file.is_file():
        raise BadInputError("the external data file is missing", where=where, got=str(tensor.location))
    end = (tensor.offset or 0) + (tensor.length or 0)
    if file.stat().st_size < end:
        raise BadInputError(
            "the external data file is truncated", where=where, expected=f"{end} bytes", got=f"{file.stat().st_size}"
        )


def all_initializers(model: ir.Model) -> list[ir.Value]:
    """Return the initializers of the graph and its subgraphs, in order."""
    return [value for graph in model.graphs() for value in graph.initializers.values()]


def serialize(model: ir.Model) -> bytes:
    """Return the one serialization of a graph; external tensors stay references, others are inlined."""
    return bytes(ir.serde.serialize_model(model).SerializeToString(deterministic=True))


def save(model: ir.Model, path: Path) -> None:
    """Write the graph deterministically; external tensors stay references, others are inlined."""
    path.write_bytes(serialize(model))


def check(path: Path) -> None:
    """Run the ONNX checker with shape inference on a saved graph.

    Raises:
        BadInputError: The checker refused it.
    """
    try:
        own = weights_folder(path.parent) == path.parent.resolve()
        onnx.checker.check_model(str(path) if own else _without_weights(path), full_check=True)
    except onnx.checker.ValidationError as error:
        raise BadInputError(
            "the ONNX checker refuses the graph", where=str(path), got=str(error).splitlines()[0]
        ) from None


def _without_weights(path: Path) -> onnx.ModelProto:
    """Return a saved graph with its external weights as inputs: the checker looks for them in its own folder only."""
    proto = onnx.ModelProto.FromString(path.read_bytes())
    inside = [t for t in proto.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    outside = [t for t in proto.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in outside:
        value = proto.graph.input.add(name=tensor.name)
        value.type.tensor_type.elem_type = tensor.data_type
        for size in tensor.dims:
            value.type.tensor_type.shape.dim.add(dim_value=size)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(inside)
    return proto


def raise_opset(model: ir.Model, version: int, path: Path) -> ir.Model:
    """Return the model at an opset of at least `version`; external tensors stay references to the folder of `path`.

    Raises:
        UnsupportedError: ONNX's version converter cannot raise it.
    """
    if model.opset_imports.get("", 1) < version:
        try:
            proto = onnx.version_converter.convert_version(ir.serde.serialize_model(model), version)
        except (RuntimeError, ValueError) as error:  # ValueError: a graph of more than 2 GB
            raise UnsupportedError(
                f"the graph cannot be raised to opset {version}", where=str(path), expected=f"opset {version}",
                got=f"opset {model.opset_imports.get('', 1)}: {' '.join(str(error).split())[:300]}",
                hint=f"export the model again at opset {version}",
            ) from None  # fmt: skip
        model = ir.serde.deserialize_model(proto)
        for value in all_initializers(model):
            if isinstance(value.const_value, ir.ExternalTensor):
                value.const_value.base_dir = str(weights_folder(path.parent))
    model.ir_version = max(model.ir_version, _IR_VERSION_OF_INT4)
    return model


def name_scopes(node: ir.Node) -> tuple[str, ...]:
    """Return the module path of a node, outermost first; empty when it is not known."""
    text = node.metadata_props.get(NAME_SCOPES, "")
    if not text:
        return ()
    value = ast.literal_eval(text)
    return tuple(str(part) for part in value)


def module_of(node: ir.Node) -> str:
    """Return the dotted path of the module that owns a node, or "" when it is not known."""
    scopes = name_scopes(node)
    return scopes[-2] if len(scopes) > 1 else ""


def dtype_name(dtype: ir.DataType) -> str:
    """Return the lower-case dtype name used everywhere in mcpc."""
    return {"FLOAT": "float32", "DOUBLE": "float64"}.get(dtype.name, dtype.name.lower())


def dtype_of(name: str) -> ir.DataType:
    """Return the ONNX dtype of a dtype name."""
    return ir.DataType[{"float32": "FLOAT", "float64": "DOUBLE"}.get(name, name.upper())]


def parse_function(text: str) -> ir.Function:
    """Return the model-local function of an ONNX text form."""
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def strip_metadata(model: ir.Model, name: str) -> None:
    """Drop everything a tracer writes about the machine it ran on; keep `name_scopes` and name the producer."""
    graphs: list[ir.Graph | ir.Function] = [*model.graphs(), *model.functions.values()]
    for graph in graphs:
        graph.metadata_props.clear()
        for node in graph:
            scopes = node.metadata_props.get(NAME_SCOPES)
            node.metadata_props.clear()
            node.doc_string = None
            if scopes:
                node.metadata_props[NAME_SCOPES] = scopes
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*graph.inputs, *(graph.initializers.values() if isinstance(graph, ir.Graph) else ())):
            value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.name = name
    model.graph.doc_string = None
    model.doc_string = None
    model.producer_name, model.producer_version = "mcpc", None

"""One ONNX graph in ONNX Runtime, as a `Runner`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from mcpc.backends.ort.twin import write_twin
from mcpc.core.runner import Array, Feeds
from mcpc.errors import BackendError, BadInputError, McpcError, UnsupportedError
from mcpc.graph import io
from mcpc.graph.widen import widen
from mcpc.storage.references import weights_folder

#: Source: onnxruntime_session_options_config_keys.h. Level 1 accumulates INT4 products in float32; at the default level
#: ONNX Runtime rounds activations to INT8.
_ACCURACY_LEVEL = "session.qdq_matmulnbits_accuracy_level"
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"

#: Widens and turns every matrix before the first run, and keeps both forms until all are done.
_FOLDING = "ConstantFolding"

_DTYPES: Mapping[str, str] = {
    "tensor(float)": "float32", "tensor(double)": "float64", "tensor(float16)": "float16",
    "tensor(int64)": "int64", "tensor(int32)": "int32", "tensor(int16)": "int16", "tensor(int8)": "int8",
    "tensor(uint64)": "uint64", "tensor(uint32)": "uint32", "tensor(uint16)": "uint16", "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}  # fmt: skip
_FAULTS = (
    ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.NotImplemented, ort_errors.InvalidGraph,
    ort_errors.NoSuchFile, ort_errors.RuntimeException, ort_errors.InvalidProtobuf, ort_errors.EPFail,
    ort_errors.NoModel, RuntimeError, ValueError,
)  # fmt: skip
_BAD_MODEL = (ort_errors.InvalidGraph, ort_errors.InvalidProtobuf, ort_errors.Fail, ort_errors.NoSuchFile)


def open_model(
    path: Path,
    *,
    accuracy_level: int | None = 1,
    threads: int = 0,
    twin: bool = True,
    optimize: bool = True,
    extra_outputs: Sequence[str] = (),
) -> OrtRunner:
    """Open an ONNX file on the CPU.

    ONNX Runtime has no bfloat16 kernels on the CPU and computes float16 partly in float32, so a graph with 16-bit
    floats is executed through its float32 twin: every such type widened, the weights streamed, one at a time, into a
    temporary folder (`TMPDIR`), which is gone once they are mapped.

    Args:
        path: The ONNX file; its weights lie in its folder.
        accuracy_level: `session.qdq_matmulnbits_accuracy_level`; None leaves ONNX Runtime's default.
        threads: Threads of one operator; 0 lets ONNX Runtime choose.
        twin: False runs a float16 graph as it is.
        optimize: False switches ONNX Runtime's graph optimizations off, so that nothing hides what the graph says.
        extra_outputs: Intermediate values of the main graph that `run` returns too.

    Raises:
        BadInputError: The file is damaged, or an extra output does not exist.
        UnsupportedError: ONNX Runtime has no kernel for an op or dtype of the graph.
        BackendError: ONNX Runtime failed in another way.
    """
    model = io.load(path)
    _expose(model, extra_outputs, path)
    widened = twin and widen(model)
    options = _options(accuracy_level, threads, optimize)
    base = weights_folder(path.parent)
    if widened or _through_links(model):
        # The files may go as soon as the session has mapped them: nothing is left behind, even after a kill.
        with tempfile.TemporaryDirectory(prefix="mcpc-twin-", ignore_cleanup_errors=True) as folder:
            write_twin(model, Path(folder))
            return OrtRunner(path, _session(path, io.serialize(model), options, Path(folder)))
    if extra_outputs or base != path.parent.resolve():
        return OrtRunner(path, _session(path, io.serialize(model), options, base))
    return OrtRunner(path, _session(path, str(path), options, None))


def open_graph(model: ir.Model, path: Path, weights: Path) -> OrtRunner:
    """Open a piece of a float graph for a single run: nothing is prepared for a second one.

    Args:
        model: The piece; 16-bit weights are widened by Casts in it.
        path: The file that it comes from, for errors.
        weights: The folder that its external tensors are relative to.

    Raises:
        McpcError: As `open_model`.
    """
    options = _options(accuracy_level=1, threads=0, optimize=True)
    options.enable_cpu_mem_arena = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    return OrtRunner(path, _session(path, io.serialize(model), options, weights, [_FOLDING]))


def _through_links(model: ir.Model) -> bool:
    """Return True when a weight file is a link, as in a Hugging Face cache; ONNX Runtime follows none."""
    tensors = [value.const_value for value in io.all_initializers(model)]
    return any(isinstance(tensor, ir.ExternalTensor) and Path(tensor.path).is_symlink() for tensor in tensors)


def _expose(model: ir.Model, names: Sequence[str], path: Path) -> None:
    """Make intermediate values of the main graph outputs as well."""
    present = {output.name for output in model.graph.outputs}
    values = {value.name: value for node in model.graph for value in node.outputs}
    for name in names:
        if name in present:
            continue
        if name not in values:
            raise BadInputError("no such value in the graph", where=str(path), got=name)
        model.graph.outputs.append(values[name])
        present.add(name)


def _options(accuracy_level: int | None, threads: int, optimize: bool) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # fatal only: everything else arrives as an exception
    options.intra_op_num_threads = threads
    # A package has several sessions; a spinning pool of one would take the cores from the next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if accuracy_level is not None:
        options.add_session_config_entry(_ACCURACY_LEVEL, str(accuracy_level))
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _session(
    path: Path,
    model: str | bytes,
    options: ort.SessionOptions,
    weights: Path | None,
    without: Sequence[str] = (),
) -> ort.InferenceSession:
    if weights is not None:
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(weights))
    try:
        return ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(without)
        )
    except _FAULTS as error:
        raise _error("ONNX Runtime cannot open the graph", path, error) from error


def _error(message: str, path: Path, error: Exception) -> McpcError:
    kind: type[McpcError] = BackendError
    if isinstance(error, ort_errors.NotImplemented):
        kind = UnsupportedError
    elif isinstance(error, _BAD_MODEL):
        kind = BadInputError
    return kind(message, where=str(path), got=_one_line(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


class OrtRunner:
    """Runs one graph. Arrays are numpy; 16-bit floats are float32 at the border."""

    def __init__(self, path: Path, session: ort.InferenceSession) -> None:
        self.path = path
        self._session = session
        self.inputs = {item.name: _dtype(item.type, f"{path}: {item.name}") for item in session.get_inputs()}
        self.outputs = tuple(item.name for item in session.get_outputs())

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the named outputs (all when None).

        Raises:
            BadInputError: An input is missing, unknown or of another dtype or shape, or an output does not exist.
            BackendError: ONNX Runtime failed.
        """
        names = self.outputs if outputs is None else tuple(outputs)
        self._check_names(feeds, names)
        arrays = {name: self._feed(name, feeds[name]) for name in self.inputs}
        try:
            results = self._session.run(list(names), arrays)
        except ort_errors.InvalidArgument as error:
            raise BadInputError(
                "ONNX Runtime refuses the inputs", where=str(self.path), got=_one_line(error)
            ) from error
        except _FAULTS as error:
            raise BackendError("ONNX Runtime failed", where=str(self.path), got=_one_line(error)) from error
        return {name: _widest(array) for name, array in zip(names, results, strict=True)}

    def _check_names(self, feeds: Feeds, outputs: Sequence[str]) -> None:
        if feeds.keys() != self.inputs.keys():
            expected, got = ", ".join(sorted(self.inputs)), ", ".join(sorted(feeds))
            raise BadInputError(
                "the inputs are not those of the graph", where=str(self.path), expected=expected, got=got
            )
        if unknown := [name for name in outputs if name not in self.outputs]:
            expected = ", ".join(self.outputs)
            raise BadInputError("no such output", where=str(self.path), expected=expected, got=", ".join(unknown))

    def _feed(self, name: str, array: Array) -> Array:
        dtype = np.dtype(self.inputs[name])
        if array.dtype == dtype:
            return array
        if array.dtype.kind == dtype.kind == "f":
            return array.astype(dtype)
        raise BadInputError(
            "an input has the wrong dtype", where=f"{self.path}: {name}", expected=dtype.name, got=array.dtype.name
        )


def _dtype(ort_type: str, where: str) -> str:
    try:
        return _DTYPES[ort_type]
    except KeyError:
        raise UnsupportedError(
            "ONNX Runtime's Python interface cannot pass this input type", where=where, got=ort_type
        ) from None


def _widest(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == np.float16 else array

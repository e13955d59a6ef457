"""Build one engine in a child process: fixed environment, fixed addresses, a time limit, and its log when it fails."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mcpc
from mcpc.backends.trt.profiles import Profile
from mcpc.errors import BackendError, Problem

_LIBRARY = "libtensorrt_rtx.so"
_INSTALL = "pip install 'mcpc[rtx]', or tensorrt-rtx-cu13, tensorrt-rtx-cu13-bindings and tensorrt-rtx-cu13-libs"
_MODEL, _ENGINE, _LOG, _OUTPUT, _REPORT, _RESULT = (
    "model.onnx",
    "out.engine",
    "build.log",
    "output.log",
    "report.txt",
    "result.json",
)


@dataclass(frozen=True)
class Built:
    """A finished plan and what the builder said about it.

    Attributes:
        engine: The plan's file.
        report: The builder's report of the finished engine, as text.
        tensorrt: Version of the builder.
        weights_bytes: Constants that the plan holds.
        memory: For each profile {"activation": bytes, "scratch": bytes} that a run will need.
        warnings: The builder's warnings, each once.
        fixed_addresses: Whether address randomization was off, which equal bytes need.
        plugin_layers: Layers that are a plugin.
        peak_rss_bytes: Peak memory of the child process.
        build_s: Wall time.
    """

    engine: Path
    report: str
    tensorrt: str
    weights_bytes: int
    memory: tuple[dict[str, int], ...]
    warnings: tuple[str, ...]
    fixed_addresses: bool
    plugin_layers: int
    peak_rss_bytes: int
    build_s: float


def require_builder() -> None:
    """Check that the builder is installed; nothing is loaded.

    Raises:
        BackendError: It is not.
    """
    if importlib.util.find_spec("tensorrt_rtx") is None or _library() is None:
        raise BackendError("TensorRT-RTX is not installed", expected="the Python package tensorrt_rtx", hint=_INSTALL)


def _library() -> Path | None:
    """Return the builder's shared library, or None."""
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((path for folder in folders for path in sorted(Path(folder).glob(f"{_LIBRARY}*"))), None)


def build(
    folder: Path, component: str, profiles: Sequence[Profile], compute_capabilities: Sequence[str], timeout_s: float
) -> Built:
    """Build the plan of `model.onnx` in a work folder.

    Args:
        folder: Holds the lowered graph and its weights; the plan is written beside them.
        component: Named in errors.
        profiles: Optimization profiles; none for a static graph.
        compute_capabilities: Chips, as TensorRT spells them.
        timeout_s: Wall-clock limit.

    Raises:
        BackendError: The builder is missing, refused the graph, died, or took too long; its log is kept.
    """
    require_builder()
    started = time.monotonic()
    job = {
        "model": _MODEL,
        "engine": _ENGINE,
        "log": _LOG,
        "report": _REPORT,
        "result": _RESULT,
        "compute_capabilities": list(compute_capabilities),
        "profiles": list(profiles),
    }
    code = _run(folder, json.dumps(job), timeout_s, component)
    result = _result(folder, component, code)
    if result["stage"] != "done":
        raise _refusal(folder, component, result)
    if result["weights_bytes"] is None or not result["memory"]:
        raise BackendError(
            "the builder's log holds no memory figures",
            where=component,
            got=f"tensorrt_rtx {result['tensorrt']}",
            hint=f"its format changed; log: {_keep_log(folder, component)}",
        )
    return Built(
        folder / _ENGINE,
        (folder / _REPORT).read_text(encoding="utf-8"),
        result["tensorrt"],
        result["weights_bytes"],
        tuple(result["memory"].values()),
        tuple(result["warnings"]),
        result["fixed_addresses"],
        result["plugin_layers"],
        result["peak_rss_bytes"],
        time.monotonic() - started,
    )


def _run(folder: Path, job: str, timeout_s: float, component: str) -> int:
    """Run the worker to its end and return its exit code; nothing of it outlives an interrupt."""
    with (folder / _OUTPUT).open("wb") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "mcpc.backends.trt.launch"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        with _ended(worker):
            try:
                worker.communicate(job.encode(), timeout=timeout_s)
            except subprocess.TimeoutExpired:
                _kill(worker)
                raise BackendError(
                    "the build took too long",
                    where=component,
                    expected=f"at most {timeout_s:g} s",
                    hint=f"raise --timeout; log: {_keep_log(folder, component)}",
                ) from None
    return worker.returncode


@contextlib.contextmanager
def _ended(worker: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if worker.poll() is None:
            _kill(worker)


def _kill(worker: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _environment(folder: Path) -> dict[str, str]:
    """Return the worker's environment: always the same, because it decides the bytes of the plan.

    The parser opens the library by its unversioned name, which the wheel does not ship: without the link in `lib` the
    process dies at the first plugin. The path is relative to the worker's folder, so that its length never varies.
    """
    library = _library()
    assert library is not None  # noqa: S101 (checked by `require_builder`)
    (folder / "lib").mkdir(exist_ok=True)
    link = folder / "lib" / _LIBRARY
    link.unlink(missing_ok=True)
    link.symlink_to(library)
    libraries = ["lib", *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    homes = [Path(mcpc.__file__).resolve().parent.parent, library.parent.parent]
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PATH": os.defpath,
        "LC_ALL": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, homes)),
    }


def _result(folder: Path, component: str, code: int) -> dict[str, Any]:
    """Return the worker's result.

    Raises:
        BackendError: It died before it wrote one.
    """
    path = folder / _RESULT
    if code == 0 and path.is_file():
        result = json.loads(path.read_text(encoding="utf-8"))
        return dict(result)
    log = _keep_log(folder, component)
    if code == -signal.SIGKILL:
        raise BackendError(
            "the builder was killed: most likely out of memory",
            where=component,
            got="SIGKILL",
            hint=f"build on a machine with more memory, or one --component at a time; log: {log}",
        )
    got = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    raise BackendError("the builder died", where=component, got=got, hint=f"log: {log}")


def _refusal(folder: Path, component: str, result: dict[str, Any]) -> BackendError:
    verb = {"parse": "cannot parse the graph", "profile": "refuses a profile", "build": "cannot build the graph"}[
        result["stage"]
    ]
    errors = [str(error) for error in result["errors"]] or ["no reason given"]
    problems = [Problem(" ".join(error.split()), component) for error in errors]
    return BackendError(
        f"TensorRT-RTX {verb}",
        where=component,
        got=problems[0].message,
        problems=problems,
        hint=f"log: {_keep_log(folder, component)}",
    )


def _keep_log(folder: Path, component: str) -> str:
    """Copy the builder's log, and what its libraries printed, out of the work folder; return the copy's path."""
    handle, path = tempfile.mkstemp(prefix=f"mcpc-build-engine-{component}-", suffix=".log")
    with os.fdopen(handle, "wb") as kept:
        for name in (_OUTPUT, _LOG):
            if (folder / name).is_file():
                with (folder / name).open("rb") as part:
                    shutil.copyfileobj(part, kept)
    return path

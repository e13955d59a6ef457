"""The child process that builds one engine: started by `launch`, a job as JSON on stdin.

A process of its own, because the builder can abort or be killed for memory, because it allows one logger per process,
and because its environment decides the bytes of the plan. Every path is relative to its working folder.
The only module that imports tensorrt_rtx.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import tensorrt_rtx as trt

from mcpc.backends.trt.launch import ADDRESS_RANDOMIZATION_OFF, QUERY, personality
from mcpc.backends.trt.memory import BuildFigures

_SEVERITIES = "IEWiv"


class Logger(trt.ILogger):  # type: ignore[misc]
    """Writes every line to the log file and keeps the figures."""

    def __init__(self, file: TextIO, figures: BuildFigures) -> None:
        trt.ILogger.__init__(self)
        self._file = file
        self._figures = figures

    def log(self, severity: trt.ILogger.Severity, message: str) -> None:
        """Take one line from TensorRT."""
        level = int(severity)
        self._file.write(f"[{_SEVERITIES[level]}] {message}\n")
        if level <= 1:
            self._file.flush()  # the next line may never come
        self._figures.add(level, message)


class Writer(trt.IStreamWriter):  # type: ignore[misc]
    """Takes the plan piece by piece, so that it is never whole in memory."""

    def __init__(self, file: BinaryIO) -> None:
        trt.IStreamWriter.__init__(self)
        self._file = file

    def write(self, data: bytes) -> int:
        """Write one piece."""
        return self._file.write(data)


def build(job: dict[str, Any], figures: BuildFigures, logger: Logger) -> dict[str, Any]:
    """Parse the graph, add the profiles, build the plan; return what happened."""
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(job["model"]):
        return {"stage": "parse", "errors": [_parser_error(parser.get_error(i)) for i in range(parser.num_errors)]}
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the read-back needs the layers
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32: TF32 keeps 10 bits of a product
    config.num_compute_capabilities = len(job["compute_capabilities"])
    for index, name in enumerate(job["compute_capabilities"]):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    for number, shapes in enumerate(job["profiles"]):
        profile = builder.create_optimization_profile()
        for name, (smallest, typical, largest) in shapes.items():
            profile.set_shape(name, smallest, typical, largest)
        if config.add_optimization_profile(profile) < 0:
            return {"stage": "profile", "errors": figures.errors or [f"profile {number} was refused"]}
    with Path(job["engine"]).open("wb") as file:
        done = builder.build_serialized_network_to_stream(network, config, Writer(file))
    if not done:
        return {"stage": "build", "errors": figures.errors}
    kinds = [str(network.get_layer(index).type).rsplit(".", 1)[-1] for index in range(network.num_layers)]
    return {"stage": "done", "errors": [], "network_layers": len(kinds), "plugin_layers": kinds.count("PLUGIN_V3")}


def _parser_error(error: trt.ParserError) -> str:
    place = f"node {error.node_name()} [{error.node_operator()}]: " if error.node_operator() else ""
    return place + " ".join(error.desc().split())


def main() -> None:
    """Do the job on stdin; `result.json` says how it went."""
    job = json.load(sys.stdin)
    figures = BuildFigures()
    with Path(job["log"]).open("w", encoding="utf-8", errors="backslashreplace") as file:
        result = build(job, figures, Logger(file, figures))
    result |= {
        "tensorrt": trt.__version__,
        "weights_bytes": figures.weights_bytes,
        "memory": {str(number): sizes for number, sizes in sorted(figures.profiles.items())},
        "warnings": figures.warnings,
        "fixed_addresses": bool(personality(QUERY) & ADDRESS_RANDOMIZATION_OFF),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(job["report"]).write_text(figures.report, encoding="utf-8")
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()

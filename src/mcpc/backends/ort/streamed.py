"""A graph that runs piece by piece: the weights of one piece are in memory at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

from mcpc.backends.ort.session import OrtRunner, open_graph, open_model
from mcpc.core.runner import Array, Feeds
from mcpc.graph import io
from mcpc.graph.rows import cut_large_matrices
from mcpc.graph.segments import Segment, has_subgraphs, segment_model, split
from mcpc.storage.references import weights_folder

#: Weights of one piece as float32. A piece is opened once per run, so smaller pieces cost time and larger ones memory.
BUDGET_BYTES = 256 << 20


class StreamedRunner:
    """Runs one graph in pieces. Every run reads all weights again.

    Args:
        path: The ONNX file.
        extra_outputs: Intermediate values that `run` can return too.
        budget_bytes: Weights of one piece as float32.
    """

    def __init__(self, path: Path, extra_outputs: Sequence[str] = (), budget_bytes: int = BUDGET_BYTES) -> None:
        self._path = path
        self._model: ir.Model = io.load(path)
        self._outputs = tuple(str(value.name) for value in self._model.graph.outputs)
        self._whole: OrtRunner | None = None
        self._segments: list[Segment] = []
        if has_subgraphs(self._model):
            self._whole = open_model(path, extra_outputs=extra_outputs)
        else:
            cut_large_matrices(self._model, budget_bytes)
            self._segments = split(self._model, budget_bytes, extra_outputs)
        self._folder = weights_folder(path.parent)

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the named outputs (the graph's when None).

        Raises:
            McpcError: As `OrtRunner.run`.
        """
        names = self._outputs if outputs is None else tuple(outputs)
        if self._whole is not None:
            return self._whole.run(feeds, names)
        found = dict(self._made(feeds, names))
        return {name: found[name] for name in names}

    def stream(self, feeds: Feeds) -> Iterator[tuple[str, Array]]:
        """Yield the graph's outputs as the pieces compute them; those of early pieces are dropped before late ones run.

        Raises:
            McpcError: As `OrtRunner.run`.
        """
        if self._whole is not None:
            yield from self._whole.run(feeds, self._outputs).items()
        else:
            yield from self._made(feeds, self._outputs)

    def _made(self, feeds: Feeds, names: Collection[str]) -> Iterator[tuple[str, Array]]:
        """Yield the values with these names, in the order in which the pieces make them."""
        last = self._last_readers()
        values: dict[str, Array] = dict(feeds)
        yield from ((name, values[name]) for name in names if name in values)
        for number, segment in enumerate(self._segments):
            runner = open_graph(segment_model(self._model, segment), self._path, self._folder)
            made = runner.run({str(value.name): values[str(value.name)] for value in segment.inputs})
            del runner
            values |= {name: array for name, array in made.items() if last.get(name, -1) > number}
            for name in [name for name in values if last.get(name, -1) <= number]:
                del values[name]
            for name in [name for name in made if name in names]:
                yield name, made.pop(name)

    def _last_readers(self) -> dict[str, int]:
        """Return {value: the last piece that reads it}."""
        return {str(value.name): number for number, piece in enumerate(self._segments) for value in piece.inputs}

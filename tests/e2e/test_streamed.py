"""Running with a part of the weights in memory: the same numbers, and the same faults found."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from test_layers import feeds_of
from test_verify import linear_weights, scale_tensor

from mcpc.backends.ort import StreamedRunner, open_model
from mcpc.checkpoint import Checkpoint
from mcpc.core.progress import Silent
from mcpc.core.runner import Array
from mcpc.graph import io
from mcpc.graph.rows import cut_large_matrices
from mcpc.graph.segments import split
from mcpc.package import Package
from mcpc.verify.compare import compare
from mcpc.workflows.checking import compare_sides
from mcpc.workflows.samples import load_samples
from mcpc.workflows.sides import CheckpointSide, PackageSide

torch = pytest.importorskip("torch")
BUDGET_BYTES = 600_000
#: So that the output head, whose product is an output of the graph, is cut as well.
SMALL_BUDGET_BYTES = 40_000
#: Kernels of a piece sum in another order than those of the whole graph.
MAX_ABS = 2e-5


@pytest.mark.parametrize("budget_bytes", [BUDGET_BYTES, SMALL_BUDGET_BYTES])
@pytest.mark.parametrize("component", ["vision_encoder", "embed", "decoder"])
def test_pieces_compute_what_the_whole_graph_does(llava_package: Path, component: str, budget_bytes: int) -> None:
    package = Package.open(llava_package)
    path = package.component_path(component)
    feeds = feeds_of(package, component)
    expected = open_model(path).run(feeds)
    actual = StreamedRunner(path, budget_bytes=budget_bytes).run(feeds)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert compare(actual[name], value).max_abs <= MAX_ABS, name


def test_a_piece_holds_no_more_weights_than_its_budget_or_one_node(llava_package: Path) -> None:
    model = io.load(llava_package / "decoder.onnx")
    pieces = split(model, BUDGET_BYTES, ())
    assert len(pieces) > 8
    for piece in pieces:
        weights = {
            value.name: 4 * value.const_value.size
            for node in piece.nodes
            for value in node.inputs
            if value is not None and value.const_value is not None
        }
        readers = [node for node in piece.nodes if node.op_type in ("MatMul", "Gemm", "Gather")]
        assert sum(weights.values()) <= BUDGET_BYTES or len(readers) <= 1, [node.name for node in piece.nodes]
    ran = [node for piece in pieces for node in piece.nodes]
    assert set(ran) == set(model.graph), "a node was lost"


def test_an_intermediate_value_can_be_asked_for(llava_package: Path) -> None:
    package = Package.open(llava_package)
    path, feeds = package.component_path("decoder"), feeds_of(package, "decoder")
    name = next(str(n.outputs[0].name) for n in io.load(path).graph if io.module_of(n).endswith("layers.2.mlp.up_proj"))
    expected = open_model(path, optimize=False, extra_outputs=[name]).run(feeds, [name])
    actual = StreamedRunner(path, [name], BUDGET_BYTES).run(feeds, [name])
    assert compare(actual[name], expected[name]).max_abs <= MAX_ABS


def _reference(checkpoint_root: Path, package: Path) -> CheckpointSide:
    """Return a LLaVA in PyTorch, large weights on disk."""
    from mcpc.export.convert import COMPUTE_DTYPE, Exporter
    from mcpc.templates.match import load_templates, select
    from mcpc.templates.plan import make_plan

    checkpoint = Checkpoint.open(checkpoint_root)
    plan = make_plan(select(checkpoint, load_templates()), Exporter(checkpoint).config, COMPUTE_DTYPE)
    return CheckpointSide(checkpoint, plan, Package.open(package).manifest, "", streamed=True)


@pytest.fixture(scope="module")
def streamed_reference(llava_package: Path, fashion_llava: Path) -> CheckpointSide:
    return _reference(fashion_llava, llava_package)


def test_pytorch_keeps_no_large_weight(streamed_reference: CheckpointSide, llava_package: Path) -> None:
    from mcpc.export import streaming

    feeds = feeds_of(Package.open(llava_package), "decoder")
    streamed_reference.runners("decoder").run(feeds)
    model = streamed_reference._reference.model  # type: ignore[attr-defined]
    kept = {name for name, tensor in model.named_parameters() if tensor.device.type != "meta"}
    large = {name for name, tensor in model.named_parameters() if 4 * tensor.numel() >= streaming._KEPT_BYTES}
    assert large, "the example has no large weight; the test shows nothing"
    assert not large & kept


def test_matrices_above_the_budget_are_computed_in_parts(llava_package: Path) -> None:
    path = llava_package / "decoder.onnx"
    model = io.load(path)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    whole = {str(node.outputs[0].name): stored for node in products if (stored := _stored(node)) is not None}
    assert cut_large_matrices(model, SMALL_BUDGET_BYTES) > 0
    assert [value.name for value in model.graph.outputs] == [value.name for value in io.load(path).graph.outputs]
    made = [node for node in model.graph if node.op_type == "Concat" and node.name.endswith(".joined.Concat")]
    assert "logits" in {node.outputs[0].name for node in made}
    for node in made:
        read = [_stored(part) for value in node.inputs if value is not None and (part := value.producer())]
        assert len(read) > 1
        assert np.array_equal(np.concatenate(read), whole[str(node.outputs[0].name)])
        assert all(4 * rows.size <= SMALL_BUDGET_BYTES for rows in read)


def _stored(product: ir.Node) -> Array | None:
    """Return the matrix in the file that a product reads, None where it reads none."""
    value = product.inputs[1]
    while value is not None and (producer := value.producer()) is not None:
        value = producer.inputs[0]
    return None if value is None or value.const_value is None else value.const_value.numpy()


def test_outputs_come_as_they_are_computed(llava_package: Path) -> None:
    package = Package.open(llava_package)
    path, feeds = package.component_path("decoder"), feeds_of(package, "decoder")
    runner = StreamedRunner(path, budget_bytes=BUDGET_BYTES)
    names = [name for name, _ in runner.stream(feeds)]
    assert sorted(names) == sorted(runner.run(feeds))
    assert names.index("present.0.key") < names.index("present.3.value") < names.index("logits")


@pytest.mark.parametrize("component", ["embed", "decoder"])
def test_pytorch_reads_large_matrices_by_rows(
    component: str, llava_package: Path, fashion_llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcpc.export import streaming

    feeds = feeds_of(Package.open(llava_package), component)
    expected = _reference(fashion_llava, llava_package).runners(component).run(feeds)
    monkeypatch.setattr(streaming, "_WHOLE_BYTES", BUDGET_BYTES)
    monkeypatch.setattr(streaming, "float32_tensor", _only_below(BUDGET_BYTES, streaming.float32_tensor))
    actual = _reference(fashion_llava, llava_package).runners(component).run(feeds)
    for name, value in expected.items():
        assert compare(actual[name], value).max_abs <= MAX_ABS, name


def _only_below(budget_bytes: int, read: Callable[[Checkpoint, str], Any]) -> Callable[[Checkpoint, str], Any]:
    def checked(checkpoint: Checkpoint, key: str) -> Any:
        tensor = read(checkpoint, key)
        assert 4 * tensor.numel() <= budget_bytes, f"{key} was read whole"
        return tensor

    return checked


def test_a_small_change_of_a_weight_is_found_and_located(
    streamed_reference: CheckpointSide, llava_package: Path, tmp_path: Path
) -> None:
    package = tmp_path / "changed"
    shutil.copytree(llava_package, package)
    names = linear_weights(Package.open(package))
    name = next(name for name in sorted(names) if "layers.2.mlp.down_proj" in name)
    scale_tensor(package, name, 1.01)
    opened = Package.open(package)
    candidate = PackageSide(package, opened.manifest, streamed=True)
    samples = load_samples(package, opened.manifest, ())
    result = compare_sides(candidate, streamed_reference, {}, samples, Silent(), "layers")
    assert not result.passed
    assert result.parting is not None and "layers.2.mlp.down_proj" in result.parting.module
    untouched = PackageSide(llava_package, opened.manifest, streamed=True)
    assert compare_sides(untouched, streamed_reference, {}, samples, Silent(), "layers").passed

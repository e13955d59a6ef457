"""A conversion with rewrites is checked with them: a fold that is wrong by a per cent fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from tiny import CHECKPOINTS
from tiny.build import write

from mcpc.core.progress import Silent
from mcpc.errors import VerificationError
from mcpc.graph import io
from mcpc.package import Package
from mcpc.passes.rewrite import batch_norm
from mcpc.workflows.convert import convert

pytestmark = pytest.mark.sweep


@pytest.fixture(scope="module")
def align(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose image tower is an EfficientNet: every convolution has a normalization."""
    root = tmp_path_factory.mktemp("align") / "checkpoint"
    write("AlignModel", CHECKPOINTS["align", "AlignModel"](), root)
    return root


def test_every_normalization_is_folded(align: Path, tmp_path: Path) -> None:
    report = convert(align, tmp_path / "package", progress=Silent())
    package = Package.open(tmp_path / "package")
    images = package.manifest.by_role("encoder", "image")
    ops = [node.op_type for node in io.load(package.component_path(images.name)).graph]
    assert "Conv" in ops and "BatchNormalization" not in ops
    fact = next(item for item in report.data["rewrites"] if item["component"] == images.name)
    folded = fact["nodes_before"] - fact["nodes_after"]
    assert fact["rewrite"] == "fold-batch-norm" and folded == 15 and not fact["skipped"]
    assert sum(item.transform == "fold batch norm" for item in images.initializers.values()) == 2 * folded


def test_a_wrong_fold_fails(align: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = batch_norm._reader
    monkeypatch.setattr(
        batch_norm,
        "_reader",
        lambda *known: lambda name: right(*known)(name) * (1.02 if name.endswith("running_var") else 1.0),
    )
    with pytest.raises(VerificationError):
        convert(align, tmp_path / "package", progress=Silent())
    assert not (tmp_path / "package").exists()

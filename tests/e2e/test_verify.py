"""Verification sees what is wrong: a 1 % change of any one Linear weight matrix, and it names the place."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcpc.checkpoint import Checkpoint
from mcpc.core.progress import Silent
from mcpc.errors import BadInputError, VerificationError
from mcpc.package import Package, PackageWriter
from mcpc.storage.safetensors import read_header
from mcpc.workflows.checking import compare_sides, require_passed
from mcpc.workflows.samples import load_samples
from mcpc.workflows.sides import CheckpointSide, PackageSide
from mcpc.workflows.verify import verify

SCALE = 1.01


def scale_tensor(package: Path, name: str, factor: float) -> None:
    """Multiply one tensor of a package in place, and seal the package again."""
    entry = next(
        found
        for path in sorted((package / "weights").iterdir())
        for found in read_header(path).values()
        if found.name == name
    )
    changed = (np.array(entry.read(), np.float32) * np.float32(factor)).astype(entry.read().dtype)
    with entry.file.open("r+b") as file:
        file.seek(entry.offset)
        file.write(changed.tobytes())
    PackageWriter(package).seal()


def linear_weights(package: Package) -> dict[str, str]:
    """Return {tensor name: component} of every Linear weight matrix that a graph multiplies by."""
    return {
        initializer.source_name: component.name
        for component in package.manifest.components
        for name, initializer in component.initializers.items()
        if name.endswith(".weight") and any(part in name for part in ("proj", "fc", "linear", "lm_head"))
    }


@pytest.fixture(scope="module")
def reference(llava_package: Path, fashion_llava: Path) -> CheckpointSide:
    """The example LLaVA in PyTorch."""
    from mcpc.export.convert import COMPUTE_DTYPE, Exporter
    from mcpc.templates.match import load_templates, select
    from mcpc.templates.plan import make_plan

    checkpoint = Checkpoint.open(fashion_llava)
    plan = make_plan(select(checkpoint, load_templates()), Exporter(checkpoint).config, COMPUTE_DTYPE)
    return CheckpointSide(checkpoint, plan, Package.open(llava_package).manifest, "")


def compare_with(reference: CheckpointSide, root: Path) -> Any:
    """Compare a package with the reference on the shipped samples."""
    package = Package.open(root)
    side = PackageSide(root, package.manifest, package.digest)
    return compare_sides(side, reference, {}, load_samples(root, package.manifest, ()), Silent())


def test_the_untouched_package_passes(reference: CheckpointSide, llava_package: Path) -> None:
    """The premise of the next test."""
    result = compare_with(reference, llava_package)
    assert result.failures() == []
    assert result.chain.greedy_total == 96
    assert all(component.outputs for component in result.components)


def test_one_per_cent_of_any_linear_fails(reference: CheckpointSide, llava_package: Path, tmp_path: Path) -> None:
    """Ten weight matrices, drawn from all of them, each scaled by 1.01 alone; the module is named."""
    linears = linear_weights(Package.open(llava_package))
    assert len(linears) > 40
    for number, name in enumerate(random.Random(0).sample(sorted(linears), 10)):
        root = tmp_path / str(number)
        shutil.copytree(llava_package, root)
        scale_tensor(root, name, SCALE)
        result = compare_with(reference, root)
        assert not result.passed, f"{name} scaled by {SCALE} passed"
        assert result.parting is not None, name
        assert result.parting.component == linears[name], name
        module = name.removesuffix(".weight").replace("vision_tower.", "").replace("language_model.", "")
        assert module.split("model.")[-1] in result.parting.module, (name, result.parting)
        with pytest.raises(VerificationError) as caught:
            require_passed(result, str(root))
        assert result.parting.node in caught.value.where
        shutil.rmtree(root)


def test_two_packages(clip_package: Path, tmp_path: Path) -> None:
    """A package equals its copy; a changed copy parts at the changed module."""
    shutil.copytree(clip_package, tmp_path / "same")
    report = verify(tmp_path / "same", clip_package, progress=Silent())
    assert report.checked == "executed"
    shutil.copytree(clip_package, tmp_path / "other")
    scale_tensor(tmp_path / "other", "text_model.encoder.layers.1.mlp.fc2.weight", SCALE)
    with pytest.raises(VerificationError) as caught:
        verify(tmp_path / "other", clip_package, progress=Silent())
    assert "text_model.encoder.layers.1.mlp.fc2" in caught.value.where


def test_other_models_are_not_compared(clip_package: Path, llava_package: Path, fashion_llava: Path) -> None:
    """Two models of different families are refused before anything runs."""
    for against in (llava_package, fashion_llava):
        with pytest.raises(BadInputError, match="not the same model"):
            verify(clip_package, against, progress=Silent())


def test_a_flipped_byte_is_found(clip_package: Path, tmp_path: Path) -> None:
    """A package whose bytes changed behind the seal is damaged, whatever its outputs."""
    shutil.copytree(clip_package, tmp_path / "flipped")
    weights = tmp_path / "flipped" / "weights" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 0x40
    weights.write_bytes(data)
    with pytest.raises(BadInputError, match=r"weights/model\.safetensors: bytes changed"):
        verify(tmp_path / "flipped", clip_package, progress=Silent())

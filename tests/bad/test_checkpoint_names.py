"""Names and ties: a wrong prefix on every key, and a tie flag against the actual bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import tiny_checkpoints as tiny
import torch
import transformers as hf
from tiny_checkpoints import SINGLE

from mcpc.backends.ort import package_runners
from mcpc.core.progress import Silent
from mcpc.errors import BadInputError, UsageError
from mcpc.inference import VisionLanguage
from mcpc.package import Package
from mcpc.workflows.convert import convert
from mcpc.workflows.verify import verify

PREFIX = "module.wrapped."


@pytest.fixture(scope="module")
def prefixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tiny.clip(tmp_path_factory.mktemp("prefixed") / "clip")

    def rename(arrays: dict[str, Any]) -> None:
        for name in list(arrays):
            arrays[PREFIX + name] = arrays.pop(name)

    tiny.edit_arrays(root / SINGLE, rename)
    return root


def test_the_right_prefix_is_offered(prefixed: Path, tmp_path: Path) -> None:
    """Every name is unknown, and known without the prefix."""
    with pytest.raises(BadInputError) as caught:
        convert(prefixed, tmp_path / "package", verify="none", progress=Silent())
    assert "unexpected" in str(caught.value)
    assert caught.value.hint == (
        f"without the prefix {PREFIX!r} every name is known: mcpc convert --strip-prefix {PREFIX}"
    )


def test_no_prefix_is_offered_for_other_names(tmp_path: Path) -> None:
    """Names that are unknown for another reason get no such hint."""
    root = tiny.clip(tmp_path / "clip")

    def rename(arrays: dict[str, Any]) -> None:
        for name in ("weight", "bias"):
            arrays[f"ghost.layer.{name}"] = arrays.pop(f"text_model.final_layer_norm.{name}")

    tiny.edit_arrays(root / SINGLE, rename)
    with pytest.raises(BadInputError) as caught:
        convert(root, tmp_path / "package", verify="none", progress=Silent())
    assert "prefix" not in caught.value.hint


def test_strip_prefix(prefixed: Path, tmp_path: Path) -> None:
    """The package is compared with PyTorch, keeps the checkpoint's own names, and can be verified again."""
    report = convert(prefixed, tmp_path / "package", strip_prefix=PREFIX, progress=Silent())
    assert report.checked == "executed"
    manifest = Package.open(tmp_path / "package").manifest
    assert manifest.lineage.steps[0].options["strip_prefix"] == PREFIX
    names = {item.source_name for component in manifest.components for item in component.initializers.values()}
    assert names
    assert all(name.startswith(PREFIX) for name in names)
    assert verify(tmp_path / "package", prefixed, progress=Silent()).checked == "executed"


def test_a_prefix_that_no_tensor_has(prefixed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--strip-prefix model\.: no tensor has this prefix \(.*got module\.wrapped"):
        convert(prefixed, tmp_path / "package", strip_prefix="model.", verify="none", progress=Silent())


def tied_llava(root: Path) -> tuple[Path, str, str]:
    """Write a tied LLaVA; return it, the tensor of its embedding, and the name of its head."""
    tiny.llava(root, tie_word_embeddings=True)
    names = list(tiny.arrays_of(root / SINGLE))
    (embedding,) = [name for name in names if name.endswith("embed_tokens.weight")]
    head = embedding.replace("model.embed_tokens", "lm_head")
    assert head not in names, "transformers stores a tied matrix once"
    return root, embedding, head


def logits_of(package: Path, ids: np.ndarray) -> np.ndarray:
    opened = Package.open(package)
    model = VisionLanguage(opened.manifest, package_runners(package, opened.manifest))
    return np.asarray(model.prefill(ids, None)[1])


def test_two_matrices_under_a_tie_flag_stay_two(tmp_path: Path) -> None:
    """The package equals PyTorch with the two matrices put in by hand under an untied config."""
    root, embedding, head = tied_llava(tmp_path / "llava")
    other = np.random.default_rng(0).normal(0, 0.2, (tiny.ROWS, 32)).astype(np.float32)
    tiny.edit_arrays(root / SINGLE, lambda arrays: arrays.update({head: other}))
    assert json.loads((root / "config.json").read_text())["tie_word_embeddings"] is True
    report = convert(root, tmp_path / "package", progress=Silent())
    assert report.checked == "executed"
    assert any("both are kept" in note for note in report.data["notes"])
    manifest = Package.open(tmp_path / "package").manifest
    sources = {item.source_name for component in manifest.components for item in component.initializers.values()}
    assert {embedding, head} <= sources

    untied = tmp_path / "untied"
    shutil.copytree(root, untied)
    tiny.edit_json(untied / "config.json", tie_word_embeddings=False, text_config__tie_word_embeddings=False)
    model = hf.LlavaForConditionalGeneration.from_pretrained(untied).eval()
    np.testing.assert_array_equal(model.get_output_embeddings().weight.detach().numpy(), other)
    ids = np.array([[5, 6, 7, 8]], np.int64)
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(ids)).logits.numpy()
    assert np.abs(logits_of(tmp_path / "package", ids) - expected).max() < 1e-4
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("written_twice", [False, True])
def test_one_matrix_of_a_tied_model_is_stored_once(written_twice: bool, tmp_path: Path) -> None:
    """The package's weights are at most 1.1 times the model's, also when the checkpoint repeats the matrix."""
    root, embedding, head = tied_llava(tmp_path / "llava")
    weights = sum(array.nbytes for array in tiny.arrays_of(root / SINGLE).values())
    if written_twice:
        tiny.edit_arrays(root / SINGLE, lambda arrays: arrays.update({head: arrays[embedding].copy()}))
        big = sum(array.nbytes for array in tiny.arrays_of(root / SINGLE).values())
        assert big - weights == tiny.ROWS * 32 * 4
    report = convert(root, tmp_path / "package", verify="none", progress=Silent())
    assert report.data["notes"] == []
    manifest = Package.open(tmp_path / "package", allow_unverified=True).manifest
    unused = {item.name: item.why for item in manifest.unused}
    assert (head in unused) == written_twice
    if written_twice:
        assert unused[head] == f"the same bytes as {embedding}, to which the config ties it"
    (decoder,) = [component for component in manifest.components if component.name == "decoder"]
    assert embedding in {item.source_name for item in decoder.initializers.values()}
    stored = sum(path.stat().st_size for path in (tmp_path / "package" / "weights").iterdir())
    assert stored <= 1.1 * weights + (1 << 16)

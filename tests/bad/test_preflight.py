"""What ships with the weights: tokenizer, processor, rotary settings and generation config against the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import tiny_checkpoints as tiny
from tiny_checkpoints import IMAGE_ID, IMAGE_TOKEN, ROWS, SINGLE

from mcpc.backends.ort import package_runners
from mcpc.core.progress import Silent
from mcpc.errors import BadInputError, McpcError, UnsupportedError, UsageError
from mcpc.export.skeleton import load_config
from mcpc.inference import VisionLanguage
from mcpc.package import Package
from mcpc.workflows.convert import convert
from mcpc.workflows.run import Request, run


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llava(tmp_path_factory.mktemp("preflight") / "llava")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llava(tmp_path_factory.mktemp("preflight") / "full", strategy="full")


def edited(source: Path, tmp_path: Path, file: str, **values: Any) -> Path:
    root = tmp_path / "llava"
    shutil.copytree(source, root, dirs_exist_ok=True)
    tiny.edit_json(root / file, **values)
    return root


def refusal(root: Path) -> str:
    """Plan the conversion; return the refusal with every finding."""
    with pytest.raises(McpcError) as caught:
        convert(root, root.parent / "package", dry_run=True, progress=Silent())
    return " | ".join([str(caught.value), *map(str, caught.value.problems)])


def other_image_id(root: Path) -> list[str]:
    tiny.edit_json(root / "config.json", image_token_index=IMAGE_ID + 1)
    return [f"expected {IMAGE_ID + 1} (config.json), got {IMAGE_ID} for '{IMAGE_TOKEN}' (tokenizer.json)"]


def image_id_beyond_the_tokenizer(root: Path) -> list[str]:
    tiny.edit_json(root / "config.json", image_token_index=ROWS + 2)
    return ["the id is not in the tokenizer", f"an id below {ROWS} (tokenizer.json), got {ROWS + 2} (config.json)"]


def token_that_is_not_there(root: Path) -> list[str]:
    tiny.edit_json(root / "processor_config.json", image_token="<picture>")
    return ["processor_config.json", "got no such token for '<picture>'"]


def another_image_size(root: Path) -> list[str]:
    tiny.edit_json(root / "preprocessor_config.json", crop_size={"height": 48, "width": 48})
    return ["images of another size (expected 32x32 (vision_config), got 48x48)"]


def another_patch_size(root: Path) -> list[str]:
    tiny.edit_json(root / "processor_config.json", patch_size=16)
    return ["another patch_size (expected 8 (vision_config), got 16 (processor))"]


def another_strategy(root: Path) -> list[str]:
    tiny.edit_json(root / "processor_config.json", vision_feature_select_strategy="full")
    return ["another vision_feature_select_strategy (expected default (config.json), got full (processor))"]


def end_beyond_the_head(root: Path) -> list[str]:
    tiny.edit_json(root / "generation_config.json", eos_token_id=[2, ROWS + 50])
    return [f"generation config: eos_token_id: the token does not exist (expected an id below the {ROWS} head rows"]


def pad_beyond_the_rows(root: Path) -> list[str]:
    tiny.edit_json(root / "generation_config.json", pad_token_id=ROWS)
    return [f"pad_token_id: the token does not exist (expected an id below the {ROWS} embedding rows, got {ROWS})"]


DISAGREEMENTS: list[Callable[[Path], list[str]]] = [
    other_image_id, image_id_beyond_the_tokenizer, token_that_is_not_there, another_image_size, another_patch_size,
    another_strategy, end_beyond_the_head, pad_beyond_the_rows,
]  # fmt: skip


@pytest.mark.parametrize("damage", DISAGREEMENTS)
def test_disagreements(damage: Callable[[Path], list[str]], llava: Path, tmp_path: Path) -> None:
    """Each is refused with both values, before anything is traced."""
    root = tmp_path / "llava"
    shutil.copytree(llava, root)
    words = damage(root)
    text = refusal(root)
    for word in words:
        assert word in text


def test_all_disagreements_at_once(llava: Path, tmp_path: Path) -> None:
    root = tmp_path / "llava"
    shutil.copytree(llava, root)
    words = [word for damage in (other_image_id, another_image_size, end_beyond_the_head) for word in damage(root)]
    text = refusal(root)
    for word in words:
        assert word in text


def test_placeholders_against_measured_features(llava: Path, tmp_path: Path) -> None:
    """The processor would write 17 placeholders where the graph computes 16 rows."""
    root = edited(llava, tmp_path, "processor_config.json", num_additional_image_tokens=2)
    with pytest.raises(BadInputError) as caught:
        convert(root, tmp_path / "package", verify="none", progress=Silent())
    assert "expected 16 rows, measured from the graph" in str(caught.value)
    assert "got 17 placeholders: 32x32 in patches of 8, 2 additional, strategy 'default'" in str(caught.value)
    assert not (tmp_path / "package").exists()


def test_full_features(full: Path, tmp_path: Path) -> None:
    """With the class token an image has 17 rows, which the config's statement of 576 does not change."""
    root = edited(full, tmp_path, "config.json", image_seq_length=576)
    report = convert(root, tmp_path / "package", verify="none", progress=Silent())
    assert report.data["notes"] == [
        "config.json says image_seq_length 576, but the graph computes 17 rows for an image"
    ]
    manifest = Package.open(tmp_path / "package", allow_unverified=True).manifest
    assert manifest.modalities["image"].rows_per_item == 17


@pytest.fixture(scope="module")
def three_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Package of a model with 104 embedding rows, a head of 104 and a tokenizer of 101."""
    folder = tmp_path_factory.mktemp("sizes")
    root = tiny.llava(folder / "llava", vocab_size=104)
    convert(root, folder / "package", verify="none", progress=Silent())
    return folder / "package"


def model_of(package: Path) -> VisionLanguage:
    opened = Package.open(package, allow_unverified=True)
    return VisionLanguage(opened.manifest, package_runners(package, opened.manifest))


def test_the_three_sizes_are_recorded(three_sizes: Path) -> None:
    vocabulary = json.loads((three_sizes / "manifest.json").read_text())["vocabulary"]
    assert vocabulary == {"tokenizer_size": ROWS, "embedding_rows": 104, "head_rows": 104}


@pytest.mark.parametrize("token", [104, 4000, -1])
def test_ids_beyond_the_rows_are_refused(token: int, three_sizes: Path) -> None:
    """The last row answers; the id after it is refused in words, not by the runtime."""
    model = model_of(three_sizes)
    assert model.prefill(np.array([[5, 103]], np.int64), None)[1].shape == (1, 2, 104)
    with pytest.raises(BadInputError, match=rf"no embedding row \(expected ids from 0 to 103, got {token}\)"):
        model.prefill(np.array([[5, token]], np.int64), None)


@pytest.mark.parametrize("count", [0, 15, 17])
def test_placeholders_must_match_the_features(count: int, three_sizes: Path) -> None:
    model = model_of(three_sizes)
    pixels = np.zeros((1, 3, 32, 32), np.float32)
    assert model.prefill(np.array([[5] + [IMAGE_ID] * 16], np.int64), pixels)[1].shape == (1, 17, 104)
    with pytest.raises(BadInputError, match=rf"placeholders do not match .*\(expected 16 rows, got {count}\)"):
        model.prefill(np.array([[5] + [IMAGE_ID] * count], np.int64), pixels)


def test_run_refuses_a_placeholder_in_the_prompt(three_sizes: Path, example_images: dict[str, Path]) -> None:
    """The prompt format places it; one more has no rows."""
    request = Request(images=(example_images["bag"],), prompt=f"{IMAGE_TOKEN} what", max_new_tokens=1)
    with pytest.raises((BadInputError, UsageError), match=r"the image placeholders do not match the images"):
        run(three_sizes, request, allow_unverified=True, on_text=lambda _: None, progress=Silent())


def test_tokenizer_beyond_the_rows_is_noted(llava: Path, tmp_path: Path) -> None:
    """A tokenizer with more ids than the table has rows converts, and says so."""
    root = tmp_path / "llava"
    shutil.copytree(llava, root)
    rows = 97
    tiny.edit_json(root / "config.json", text_config__vocab_size=rows)

    def cut(arrays: dict[str, Any]) -> None:
        for name in [name for name in arrays if arrays[name].shape[:1] == (ROWS,)]:
            arrays[name] = arrays[name][:rows].copy()

    tiny.edit_arrays(root / SINGLE, cut)
    report = convert(root, tmp_path / "package", verify="none", progress=Silent())
    assert report.data["notes"] == [
        "the tokenizer has ids up to 100, the embedding 97 rows: a text with an id beyond is refused"
    ]


LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
ACCEPTED: dict[str, tuple[Any, str]] = {
    "none": (None, "default"),
    "linear-type": ({"type": "linear", "factor": 2.0}, "linear"),
    "linear-rope-type": ({"rope_type": "linear", "factor": 2.0}, "linear"),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, "yarn"),
    "yarn-type": ({"type": "yarn", "factor": 4.0}, "yarn"),
    "llama3": ({"rope_type": "llama3", **LLAMA3}, "llama3"),
    "llama3-type": ({"type": "llama3", **LLAMA3}, "llama3"),
    "both-equal": ({"type": "linear", "rope_type": "linear", "factor": 2.0}, "linear"),
}
REFUSED: dict[str, tuple[Any, type[McpcError], str]] = {
    "mrope-on-a-llama": ({"type": "mrope", "mrope_section": [1, 1, 2]}, UnsupportedError, "got mrope"),
    "unknown": ({"rope_type": "su", "factor": 2.0}, UnsupportedError, "does not compute this type for this model"),
    "dynamic": ({"type": "dynamic", "factor": 2.0}, UnsupportedError, "change with the length of the prompt"),
    "llama3-incomplete": ({"rope_type": "llama3", "factor": 8.0}, BadInputError, "low_freq_factor"),
    "both-differ": ({"type": "linear", "rope_type": "llama3", **LLAMA3}, BadInputError, "type and rope_type differ"),
    "no-type": ({"factor": 2.0}, BadInputError, "a factor without a type"),
    "no-object": ([1, 2], BadInputError, "cannot read the config"),
}


def with_rope(source: Path, tmp_path: Path, scaling: Any) -> Path:
    """Write the settings as older checkpoints do: rope_theta beside rope_scaling."""
    root = tmp_path / "llava"
    shutil.copytree(source, root)
    config = json.loads((root / "config.json").read_text())
    config["text_config"].pop("rope_parameters")
    config["text_config"] |= {"rope_theta": 10000.0, "rope_scaling": scaling}
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize("name", ACCEPTED)
def test_rope_scaling_spellings(name: str, llava: Path, tmp_path: Path) -> None:
    scaling, kind = ACCEPTED[name]
    config = load_config(with_rope(llava, tmp_path, scaling))
    assert config.text_config.rope_parameters["rope_type"] == kind


@pytest.mark.parametrize("name", ["llama3-type"])
def test_rope_scaling_is_computed(name: str, llava: Path, tmp_path: Path) -> None:
    """The package equals PyTorch at positions where the scaling shows."""
    root = with_rope(llava, tmp_path, ACCEPTED[name][0])
    assert convert(root, tmp_path / "package", progress=Silent()).checked == "executed"
    plain = tmp_path / "plain"
    convert(llava, plain, verify="none", progress=Silent())
    ids = np.array([list(range(5, 85))], np.int64)
    difference = np.abs(model_of(tmp_path / "package").prefill(ids, None)[1] - model_of(plain).prefill(ids, None)[1])
    assert difference.max() > 1e-3


@pytest.mark.parametrize("name", REFUSED)
def test_rope_scaling_refused(name: str, llava: Path, tmp_path: Path) -> None:
    """One clear error, never a KeyError, never a setting that is ignored."""
    scaling, kind, words = REFUSED[name]
    with pytest.raises(kind) as caught:
        load_config(with_rope(llava, tmp_path, scaling))
    assert words in " | ".join([str(caught.value), *map(str, caught.value.problems)])

"""Experts that a checkpoint stores one by one: what is made of them, what is missing, what has another shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import tiny_checkpoints as tiny
import transformers as hf
from tiny.build import Tiny, write
from tiny.processors import clip_images
from tiny_checkpoints import SINGLE

from mcpc.core.progress import Silent
from mcpc.errors import BadInputError
from mcpc.package import Package
from mcpc.workflows.convert import convert

EXPERTS = 5


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    """A LLaVA whose language model has five experts a layer, two of them for each token."""
    text = hf.MixtralConfig(**tiny.TEXT, num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=None)
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**tiny.VISION), text_config=text, image_token_index=tiny.IMAGE_ID,
        vision_feature_layer=-2, image_seq_length=16,
    )  # fmt: skip
    processor = {"image_token": tiny.IMAGE_TOKEN, "patch_size": 8, "num_additional_image_tokens": 1,
                 "vision_feature_select_strategy": "default"}  # fmt: skip
    files = {**clip_images(32), "processor_config.json": processor}
    special = {tiny.IMAGE_TOKEN: tiny.IMAGE_ID}
    root = tmp_path / "mixtral"
    write("LlavaForConditionalGeneration", Tiny(config, special, files, tiny.GENERATION, tiny.ROWS), root)
    tiny.edit_json(root / "tokenizer_config.json", image_token=tiny.IMAGE_TOKEN)
    return root


def expert(number: int, name: str) -> str:
    """Return the name of a matrix of one expert of the second layer."""
    return f"language_model.model.layers.1.block_sparse_moe.experts.{number}.{name}.weight"


def test_a_missing_expert_is_named(mixtral: Path, tmp_path: Path) -> None:
    """One matrix of one expert, and all of another expert."""
    gone = [expert(3, "w2"), *(expert(EXPERTS - 1, name) for name in ("w1", "w2", "w3"))]

    def remove(arrays: dict[str, Any]) -> None:
        for name in gone:
            del arrays[name]

    tiny.edit_arrays(mixtral / SINGLE, remove)
    with pytest.raises(BadInputError, match="4 missing, 0 unexpected, 0 wrong shape") as caught:
        convert(mixtral, tmp_path / "package", verify="none", progress=Silent())
    assert sorted(problem.where for problem in caught.value.problems) == sorted(gone)
    assert not (tmp_path / "package").exists()


def test_an_expert_of_another_shape_is_refused(mixtral: Path, tmp_path: Path) -> None:
    """The parts and their shapes are listed."""
    name = expert(2, "w1")

    def narrow(arrays: dict[str, Any]) -> None:
        arrays[name] = np.ascontiguousarray(arrays[name][:, :-1])

    tiny.edit_arrays(mixtral / SINGLE, narrow)
    with pytest.raises(BadInputError, match="do not fit together") as caught:
        convert(mixtral, tmp_path / "package", verify="none", progress=Silent())
    shapes = {problem.where: problem.got for problem in caught.value.problems}
    assert shapes[name] == str([tiny.TEXT["intermediate_size"], tiny.TEXT["hidden_size"] - 1])


def test_experts_are_recorded_and_compared_with_streamed_weights(mixtral: Path, tmp_path: Path) -> None:
    """The bytes of the package are those that transformers' own loader makes; lineage names the parts."""
    convert(mixtral, tmp_path / "package", verify="layers", progress=Silent())
    package = Package.open(tmp_path / "package")
    initializers = package.manifest.component("decoder").initializers
    made = {name: item for name, item in initializers.items() if ".experts." in name}
    assert {item.transform for item in made.values()} == {"stack(0)", "stack(0), concatenate(1)"}
    assert all(".experts.*." in item.source_name for item in made.values())
    loaded = hf.LlavaForConditionalGeneration.from_pretrained(mixtral).state_dict()
    stored = tiny.arrays_of(tmp_path / "package" / "weights" / "made.safetensors")
    assert len(stored) == 2 * tiny.TEXT["num_hidden_layers"]
    for name, array in stored.items():
        np.testing.assert_array_equal(array, loaded[name.split(" = ")[0]].numpy())

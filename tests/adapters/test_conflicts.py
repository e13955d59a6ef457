"""Where adapters meet ties, each other, other names and other layouts: merged as peft does, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("peft")
import transformers as hf
from lora_models import MAX_ABS, QV, distance, merged, tiny, train, unmerged

from mcpc.checkpoint.adapters import Adapter
from mcpc.checkpoint.lora import Drift, LowRank, Merge
from mcpc.errors import BadInputError, UnsupportedError, UsageError

CLIP, LLAVA = "CLIPModel", "LlavaForConditionalGeneration"
TENSORS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.clip(tmp_path_factory.mktemp("clip") / "clip")


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llava(tmp_path_factory.mktemp("llava") / "llava")


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llava(tmp_path_factory.mktemp("tied") / "llava", tie_word_embeddings=True)


@pytest.mark.parametrize("where", ["target_modules", "modules_to_save"])
def test_a_tied_pair_that_peft_keeps_tied(where: str, tied: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"], "ensure_weight_tying": True}
    options[where] = [*options.get(where, []), "embed_tokens"]
    adapter = train(tmp_path / "adapter", tied, LLAVA, **options)
    ours = merged(tied, [adapter])
    assert distance(LLAVA, ours, unmerged(tied, LLAVA, [adapter])) <= MAX_ABS
    assert ours.lm_head.weight is ours.model.language_model.embed_tokens.weight


@pytest.mark.parametrize("where", ["target_modules", "modules_to_save"])
def test_a_tied_pair_that_was_trained_apart(where: str, tied: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["q_proj"]}
    options[where] = [*options.get(where, []), "embed_tokens", "lm_head"]
    adapter = train(tmp_path / "adapter", tied, LLAVA, **options)
    with pytest.raises(UnsupportedError, match=r"lm_head.weight: tied to .*, which the adapter changes otherwise"):
        merged(tied, [adapter])


def test_trained_biases_have_the_weight_1(clip: Path, tmp_path: Path) -> None:
    adapter = train(tmp_path / "adapter", clip, CLIP, target_modules=QV, bias="lora_only")
    assert any(name.endswith(".base_layer.bias") for name in tiny.arrays_of(adapter / TENSORS))
    with pytest.raises(UsageError, match="can only have the weight 1"):
        Adapter.open(adapter, 0.5)


def test_two_adapters_that_replace_one_tensor(llava: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"target_modules": QV, "modules_to_save": ["multi_modal_projector"]}
    first = train(tmp_path / "first", llava, LLAVA, **options)
    second = train(tmp_path / "second", llava, LLAVA, seed=2, **options)
    plain = train(tmp_path / "plain", llava, LLAVA, target_modules=["linear_1"])
    with pytest.raises(UnsupportedError, match="first and second replace it, by different tensors"):
        merged(llava, [first, second], [1.0, 1.0])
    with pytest.raises(UnsupportedError, match="first replaces it, and plain updates what it was"):
        merged(llava, [first, plain], [1.0, 1.0])


def test_an_embedding_table_that_peft_saves_as_it_was_replaces_nothing(llava: Path, tmp_path: Path) -> None:
    first = train(tmp_path / "first", llava, LLAVA, target_modules=["embed_tokens"])
    assert any(name.endswith("embed_tokens.base_layer.weight") for name in tiny.arrays_of(first / TENSORS))
    second = train(tmp_path / "second", llava, LLAVA, seed=2, target_modules=["embed_tokens"])
    tiny.edit_arrays(second / TENSORS, lambda arrays: [arrays.pop(n) for n in list(arrays) if "base_layer" in n])
    pair = [first, second]
    assert distance(LLAVA, merged(llava, pair, [1.0, 1.0]), unmerged(llava, LLAVA, pair, [1.0, 1.0])) <= MAX_ABS


def test_one_adapter_twice_is_two(clip: Path, tmp_path: Path) -> None:
    adapter = train(tmp_path / "adapter", clip, CLIP, target_modules=QV)
    twice = merged(clip, [adapter, adapter], [1.0, 1.0])
    assert distance(CLIP, twice, merged(clip, [adapter], [2.0])) <= MAX_ABS


def test_names_of_older_trees(llava: Path, tmp_path: Path) -> None:
    """What was trained when the language model was called `language_model.model`."""
    adapter = train(tmp_path / "adapter", llava, LLAVA, target_modules=[*QV, "linear_1"])
    expected = merged(llava, [adapter])
    old = {
        "model.language_model.": "language_model.model.",
        "model.multi_modal": "multi_modal",
        "model.vision": "vision",
    }

    def rename(arrays: dict[str, Any]) -> None:
        for name in list(arrays):
            short = name.removeprefix("base_model.model.")
            new = next(value + short.removeprefix(key) for key, value in old.items() if short.startswith(key))
            arrays[f"base_model.model.{new}"] = arrays.pop(name)

    tiny.edit_arrays(adapter / TENSORS, rename)
    assert distance(LLAVA, merged(llava, [adapter]), expected) == 0.0


def _moved(to: str) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        parts = {name.partition(".lora_")[2]: value for name, value in arrays.items()}
        arrays.clear()
        arrays.update({f"base_model.model.{to}.lora_{part}": value for part, value in parts.items()})

    return change


def test_modules_of_other_kinds(clip: Path, tmp_path: Path) -> None:
    adapter = train(tmp_path / "adapter", clip, CLIP, target_modules=["q_proj"])
    tiny.edit_arrays(adapter / TENSORS, _moved("vision_model.post_layernorm"))
    with pytest.raises(UnsupportedError, match="a module of a kind that mcpc does not merge: LayerNorm"):
        merged(clip, [adapter])


def test_experts_are_one_tensor(clip: Path, tmp_path: Path) -> None:
    text = hf.MixtralConfig(**tiny.TEXT, num_local_experts=3, num_experts_per_tok=2, sliding_window=None)
    config = hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**tiny.VISION), text_config=text, image_seq_length=16)
    root = tmp_path / "mixtral"
    tiny.write(LLAVA, tiny.Tiny(config, files={}, vocabulary=tiny.ROWS), root)
    adapter = train(tmp_path / "adapter", clip, CLIP, target_modules=["q_proj"])
    place = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"
    tiny.edit_arrays(adapter / TENSORS, _moved(place))
    with pytest.raises(UnsupportedError, match=re.escape(f"{place}: one of several tensors that make up")):
        merged(root, [adapter])


def test_four_bits_are_refused(tmp_path: Path) -> None:
    from test_quantized_checkpoints import four_bit_llava

    root, _ = four_bit_llava(tmp_path / "gptq", "gptq")
    plain = tiny.llava(tmp_path / "plain", hidden_size=32)
    adapter = train(tmp_path / "adapter", plain, LLAVA, target_modules=r".*language_model.*\.q_proj")
    with pytest.raises((UnsupportedError, BadInputError)) as caught:
        merged(root, [adapter])
    assert isinstance(caught.value, UnsupportedError), caught.value.problems
    assert "stored in four bits" in str(caught.value) and "peft" in caught.value.hint


def test_a_row_without_direction_is_named() -> None:
    """DoRA divides by a row's length."""
    base = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    zero = LowRank(
        lambda: np.zeros((2, 1), np.float32), lambda: np.zeros((1, 2), np.float32), 1.0,
        lambda: np.ones((2, 1), np.float32),
    )  # fmt: skip
    merge = Merge("layer.weight", (2, 2), "float32", lambda step: iter([base]), [(zero, Drift())])
    with pytest.raises(BadInputError, match=r"layer\.weight: DoRA gives row 1 a length"):
        list(merge.rows())


def test_mcpc_never_imports_peft() -> None:
    source = Path(__file__).resolve().parents[2] / "src"
    importing = re.compile(r"^\s*(import|from)\s+(peft|accelerate)\b", re.MULTILINE)
    assert [path.name for path in source.rglob("*.py") if importing.search(path.read_text())] == []

"""LoRA merges: each variant that peft trains, against peft's own model with the adapter beside the weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("peft")
import torch
import transformers as hf
from lora_models import MAX_ABS, QV, distance, inputs, merged, tiny, train, unmerged

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.adapters import Adapter
from mcpc.checkpoint.lora import Drift, LowRank, Merge
from mcpc.core.progress import Silent
from mcpc.core.runner import Array
from mcpc.errors import BadInputError, UnsupportedError, UsageError
from mcpc.export.convert import Exporter
from mcpc.package import Package
from mcpc.workflows.convert import convert


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint of each class, by its name."""
    root = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    gpt = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=101, n_positions=64))
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    gpt.save_pretrained(root / "gpt")
    return {
        "CLIPModel": tiny.clip(root / "clip"),
        "LlavaForConditionalGeneration": tiny.llava(root / "llava"),
        "GPT2LMHeadModel": root / "gpt",
    }


CLIP, LLAVA, GPT = "CLIPModel", "LlavaForConditionalGeneration", "GPT2LMHeadModel"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (LLAVA, {"target_modules": QV}),
    "by expression": (LLAVA, {"target_modules": r".*language_model.*\.(k_proj|down_proj)"}),
    "patterns": (
        LLAVA,
        {
            "target_modules": [*QV, "gate_proj"],
            "rank_pattern": {"gate_proj": 3, r"language_model\.layers\.1\.self_attn\.q_proj": 5},
            "alpha_pattern": {"v_proj": 11},
        },
    ),
    "rank-stabilized": (LLAVA, {"target_modules": QV, "use_rslora": True, "r": 7}),
    "DoRA": (LLAVA, {"target_modules": [*QV, "down_proj"], "use_dora": True}),
    "embedding": (LLAVA, {"target_modules": ["embed_tokens", "q_proj"]}),
    "embedding with DoRA": (LLAVA, {"target_modules": ["embed_tokens"], "use_dora": True}),
    "modules_to_save": (LLAVA, {"target_modules": QV, "modules_to_save": ["lm_head", "multi_modal_projector"]}),
    "trained biases": (CLIP, {"target_modules": QV, "bias": "all"}),
    "biases of updates": (CLIP, {"target_modules": QV, "lora_bias": True}),
    "convolution": (CLIP, {"target_modules": ["patch_embedding", "q_proj"]}),
    "convolution with DoRA": (CLIP, {"target_modules": ["patch_embedding"], "use_dora": True}),
    "fan_in_fan_out": (GPT, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "fan_in_fan_out with DoRA": (GPT, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_merges_as_peft_does(variant: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    cls, options = VARIANTS[variant]
    adapter = train(tmp_path / "adapter", checkpoints[cls], cls, **options)
    expected = unmerged(checkpoints[cls], cls, [adapter])
    base = getattr(hf, cls).from_pretrained(checkpoints[cls], dtype=torch.float32).eval()
    assert distance(cls, base, expected) > 100 * MAX_ABS, "the adapter changes nothing; the test shows nothing"
    assert distance(cls, merged(checkpoints[cls], [adapter]), expected) <= MAX_ABS


def test_two_adapters_with_weights(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    first = train(tmp_path / "first", checkpoints[LLAVA], LLAVA, target_modules=QV)
    second = train(tmp_path / "second", checkpoints[LLAVA], LLAVA, seed=2, target_modules=["v_proj", "up_proj"], r=2)
    pair, weights = [first, second], [0.5, -1.25]
    ours = merged(checkpoints[LLAVA], pair, weights)
    assert distance(LLAVA, ours, unmerged(checkpoints[LLAVA], LLAVA, pair, weights)) <= MAX_ABS
    assert distance(LLAVA, ours, unmerged(checkpoints[LLAVA], LLAVA, pair, [1.0, 1.0])) > 100 * MAX_ABS


def test_a_package_with_an_adapter(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The whole way: converted, checked, run by ONNX Runtime, and as far from peft's unmerged model as rounding."""
    from mcpc.backends.ort import package_runners
    from mcpc.inference import DualEncoder

    first = train(tmp_path / "first", checkpoints[CLIP], CLIP, target_modules=[*QV, "token_embedding"])
    second = train(tmp_path / "second", checkpoints[CLIP], CLIP, seed=2, target_modules=QV, use_rslora=True)
    pair, weights = [first, second], [1.0, 0.5]
    output = tmp_path / "package"
    adapters = list(zip(pair, weights, strict=True))
    report = convert(checkpoints[CLIP], output, adapters=adapters, progress=Silent())
    package = Package.open(output)
    model = DualEncoder(package.manifest, package_runners(output, package.manifest))
    feeds = {name: tensor.numpy() for name, tensor in inputs(CLIP).items()}
    scores = model.scores(model.encode_images(feeds), model.encode_texts(feeds))
    with torch.no_grad():
        expected = unmerged(checkpoints[CLIP], CLIP, pair, weights)(**inputs(CLIP))["logits_per_image"]
    assert np.abs(scores - expected.numpy()).max() <= MAX_ABS
    lineage = package.manifest.lineage.steps[0].options["adapters"]
    assert [(item["name"], item["weight"]) for item in lineage] == [("first", 1.0), ("second", 0.5)]
    facts = report.data["adapters"]
    assert facts[0]["updated"] == 9 and facts[1]["updated"] == 8
    assert facts[0]["furthest"] and 0 < facts[0]["mean_drift"] <= facts[0]["max_drift"]


def test_drift_is_the_norm_of_the_change_over_that_of_the_weight() -> None:
    base = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    update = LowRank(lambda: np.array([[1.0], [0.0]], np.float32), lambda: np.array([[0.0, 2.0]], np.float32), 0.5)
    drift = Drift()
    merge = Merge("w", (2, 2), "float32", lambda step: iter([base[:1], base[1:]]), [(update, drift)])
    assert np.array_equal(np.concatenate(list(merge.rows())), [[3.0, 1.0], [0.0, 4.0]])
    assert drift.of["w"] == pytest.approx(1 / 5)


def test_a_wrong_merge_is_seen(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The parity check can fail: a scaling that ignores rsLoRA is far from peft."""
    adapter = train(tmp_path / "adapter", checkpoints[LLAVA], LLAVA, target_modules=QV, use_rslora=True)
    expected = unmerged(checkpoints[LLAVA], LLAVA, [adapter])
    tiny.edit_json(adapter / "adapter_config.json", use_rslora=False)
    assert distance(LLAVA, merged(checkpoints[LLAVA], [adapter]), expected) > 100 * MAX_ABS


Damage = Callable[[Path], Any]


def _rewritten(edit: Callable[[dict[str, Array]], Any]) -> Damage:
    def damage(root: Path) -> None:
        from safetensors.numpy import load_file, save_file

        path = root / "adapter_model.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)

    return damage


def _config(**fields: Any) -> Damage:
    return lambda root: tiny.edit_json(root / "adapter_config.json", **fields)


def _renamed(tensors: dict[str, Array]) -> None:
    for name in list(tensors):
        tensors[name.replace("self_attn", "attention")] = tensors.pop(name)


def _first(tensors: dict[str, Array], end: str) -> str:
    return min(name for name in tensors if name.endswith(end))


def _without(end: str) -> Callable[[dict[str, Array]], Any]:
    return lambda tensors: tensors.pop(_first(tensors, end))


def _poisoned(tensors: dict[str, Array]) -> None:
    tensors[_first(tensors, "lora_B.weight")][0, 0] = np.nan


def _narrow(tensors: dict[str, Array]) -> None:
    name = _first(tensors, "lora_A.weight")
    tensors[name] = np.ascontiguousarray(tensors[name][:, :-1])


def _cut(root: Path) -> None:
    path = root / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _pickled(root: Path) -> None:
    (root / "adapter_model.safetensors").rename(root / "adapter_model.bin")


BAD: dict[str, tuple[Damage, type[Exception], str]] = {
    "another method": (_config(peft_type="IA3"), UnsupportedError, "not LoRA"),
    "no config": (lambda root: (root / "adapter_config.json").unlink(), BadInputError, "adapter_config.json"),
    "rank": (_config(r=5), BadInputError, "another rank than the config says"),
    "rank is a word": (_config(r="many"), BadInputError, "r is no whole number above 0: 'many'"),
    "rank is a fraction": (_config(r=8.5), BadInputError, "r is no whole number above 0: 8.5"),
    "rank of a pattern": (_config(rank_pattern={"q_proj": True}), BadInputError, "rank_pattern.q_proj"),
    "alpha": (_config(lora_alpha="16"), BadInputError, "lora_alpha is no number"),
    "flag": (_config(use_rslora="false"), BadInputError, "use_rslora is neither true nor false"),
    "saved": (_config(modules_to_save="lm_head"), BadInputError, "modules_to_save is no list"),
    "saved, not there": (_config(modules_to_save=["text_projection"]), BadInputError, "text_projection.weight"),
    "saved, unknown": (_config(modules_to_save=["classifier"]), BadInputError, "classifier"),
    "unknown number": (_config(use_tomorrow=0), UnsupportedError, "use_tomorrow"),
    "pattern": (_config(rank_pattern={"(": 4}), BadInputError, "no regular expression"),
    "changed base": (_config(init_lora_weights="pissa"), UnsupportedError, "init_lora_weights"),
    "new tokens": (_config(trainable_token_indices=[1, 2]), UnsupportedError, "trainable_token_indices"),
    "unknown field": (_config(use_tomorrow=True), UnsupportedError, "use_tomorrow"),
    "no magnitudes": (_config(use_dora=True), BadInputError, "missing: magnitude"),
    "a half": (_rewritten(_without("lora_B.weight")), BadInputError, "missing: b of the update"),
    "not finite": (_rewritten(_poisoned), BadInputError, "1 non-finite values"),
    "another shape": (_rewritten(_narrow), BadInputError, "the update does not fit the weight"),
    "another model": (_rewritten(_renamed), BadInputError, "0 of 8 applied"),
    "cut": (_cut, BadInputError, "truncated"),
    "pickled": (_pickled, UnsupportedError, "pickled"),
    "no tensors": (lambda root: (root / "adapter_model.safetensors").unlink(), BadInputError, "has no tensors"),
}


@pytest.fixture(scope="module")
def adapter(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain adapter of CLIP."""
    return train(tmp_path_factory.mktemp("adapter") / "plain", checkpoints[CLIP], CLIP, target_modules=QV)


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_adapter_is_refused(kind: str, checkpoints: dict[str, Path], adapter: Path, tmp_path: Path) -> None:
    import shutil

    damage, error, text = BAD[kind]
    root = tmp_path / "adapter"
    shutil.copytree(adapter, root)
    damage(root)
    with pytest.raises(error) as caught:
        Exporter(Checkpoint.open(checkpoints[CLIP]), [Adapter.open(root)])
    problems = getattr(caught.value, "problems", ())
    assert text in "\n".join([str(caught.value), str(getattr(caught.value, "got", "")), *map(str, problems)])


def test_what_cannot_be_merged_exactly(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tied = tiny.llava(tmp_path / "tied", tie_word_embeddings=True)
    head = train(tmp_path / "head", tied, LLAVA, target_modules=["embed_tokens"])
    with pytest.raises(UnsupportedError, match="tied to"):
        merged(tied, [head])
    dora = train(tmp_path / "dora", checkpoints[LLAVA], LLAVA, target_modules=QV, use_dora=True)
    plain = train(tmp_path / "plain", checkpoints[LLAVA], LLAVA, target_modules=["v_proj"])
    with pytest.raises(UnsupportedError, match="DoRA together with another adapter"):
        merged(checkpoints[LLAVA], [dora, plain], [1.0, 1.0])
    saved = train(tmp_path / "saved", checkpoints[LLAVA], LLAVA, target_modules=QV, modules_to_save=["lm_head"])
    with pytest.raises(UsageError, match="can only have the weight 1"):
        Adapter.open(saved, 0.5)
    for weight in (0.0, float("nan")):
        with pytest.raises(UsageError, match="a number other than 0"):
            Adapter.open(plain, weight)


def test_the_option_takes_a_folder_and_a_weight(tmp_path: Path) -> None:
    from mcpc.cli.options import parse_adapter

    odd = tmp_path / "rate=3"
    odd.mkdir()
    assert parse_adapter("style") == (Path("style"), 1.0)
    assert parse_adapter("style=-0.5") == (Path("style"), -0.5)
    assert parse_adapter(str(odd)) == (odd, 1.0)
    assert parse_adapter(f"{odd}=2") == (odd, 2.0)
    with pytest.raises(UsageError, match=re.escape("the weight of an adapter is a number")):
        parse_adapter("style=much")


@pytest.mark.parametrize("fields", [{"r": 4.5}, {"use_rslora": "false"}, {"lora_alpha": None}, {"rank_pattern": [1]}])
def test_a_config_of_other_types_is_malformed(fields: dict[str, Any], adapter: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(adapter, tmp_path / "adapter")
    tiny.edit_json(tmp_path / "adapter" / "adapter_config.json", **fields)
    with pytest.raises(BadInputError, match="malformed adapter config"):
        Adapter.open(tmp_path / "adapter")


def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    model = hf.LlavaForConditionalGeneration.from_pretrained(checkpoints[LLAVA], dtype=torch.bfloat16)
    narrow = tmp_path / "narrow"
    model.save_pretrained(narrow)
    lora = train(tmp_path / "lora", checkpoints[LLAVA], LLAVA, target_modules=QV)
    wide = Exporter(Checkpoint.open(narrow), [Adapter.open(lora)], "float32").checkpoint
    kept = Exporter(Checkpoint.open(narrow), [Adapter.open(lora)]).checkpoint
    name = next(iter(wide.merged))
    exact = np.concatenate(list(wide.pieces(wide.merged[name])))
    rounded = np.concatenate(list(kept.pieces(kept.merged[name])))
    assert exact.dtype == np.float32 and kept.dtype_of(kept.merged[name]) == "bfloat16"
    assert np.array_equal(rounded, exact.astype(rounded.dtype))
    assert not np.array_equal(rounded.astype(np.float32), exact)

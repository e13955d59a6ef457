"""Layers that are traced once and cloned: bit-equal to tracing every layer, and no slower with depth."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mcpc.backends.ort import package_runners
from mcpc.checkpoint import Checkpoint
from mcpc.core.progress import Silent
from mcpc.graph import io
from mcpc.package import Package
from mcpc.storage.safetensors import Plan, write_stream
from mcpc.templates.match import load_templates, select
from mcpc.templates.plan import make_plan

torch = pytest.importorskip("torch")

SIZES = {"images": 2, "feature_rows": 32, "batch": 2, "sequence": 9, "past": 4}


@pytest.fixture
def mixed(fashion_llava: Path, tmp_path: Path) -> Path:
    """A random LLaVA whose six decoder layers alternate between sliding and full attention, with biases."""
    from mcpc.export.skeleton import build_skeleton

    root = tmp_path / "mixed"
    shutil.copytree(fashion_llava, root)
    (root / "model.safetensors").unlink()
    config = json.loads((root / "config.json").read_text())
    config["text_config"] = {
        "model_type": "qwen2", "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 6, "vocab_size": 411,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "use_sliding_window": True, "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 3,
    }  # fmt: skip
    (root / "config.json").write_text(json.dumps(config))
    state = build_skeleton(root, "LlavaForConditionalGeneration", "float32").state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if tensor.device.type == "meta"}
    random = np.random.default_rng(7)
    plans = [Plan(name, "float32", shape) for name, shape in shapes.items()]
    with (root / "model.safetensors").open("wb") as file:
        write_stream(file, plans, (random.standard_normal(plan.shape, np.float32) * 0.2 for plan in plans))
    return root


@pytest.fixture
def each_layer(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Make conversions trace every layer."""
    from mcpc.export.convert import Exporter

    monkeypatch.setattr(Exporter, "trace", functools.partialmethod(Exporter.trace, each_layer=True))
    return monkeypatch


def feeds_of(package: Package, component: str) -> dict[str, np.ndarray]:
    """Return seeded inputs of a component, the second prompt padded on the left."""
    random = np.random.default_rng(3)
    feeds = {}
    for tensor in package.manifest.component(component).inputs:
        shape = [sum(SIZES[n] for n in d.split("+")) if isinstance(d, str) else d for d in tensor.shape]
        if tensor.name == "attention_mask":
            feeds[tensor.name] = np.ones(shape, np.int64)
            feeds[tensor.name][1, :2] = 0
        elif tensor.dtype == "int64":
            feeds[tensor.name] = random.integers(5, 40, shape)
        else:
            feeds[tensor.name] = random.standard_normal(shape, np.float32)
    return feeds


@pytest.mark.parametrize("source", [pytest.param("fashion_llava", marks=pytest.mark.sweep), "mixed"])
def test_clones_are_bit_equal_to_the_full_trace(
    source: str, request: pytest.FixtureRequest, each_layer: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mcpc.workflows.convert import convert

    checkpoint = request.getfixturevalue(source)
    convert(checkpoint, tmp_path / "full", verify="none", progress=Silent())
    each_layer.undo()
    convert(checkpoint, tmp_path / "cloned", verify="none", progress=Silent())
    full, cloned = Package.open(tmp_path / "full"), Package.open(tmp_path / "cloned")
    assert any("@" in node.name for node in io.load(cloned.root / "decoder.onnx").graph), "nothing was cloned"
    assert not any("@" in node.name for node in io.load(full.root / "decoder.onnx").graph)
    for component in ("vision_encoder", "decoder"):
        feeds = feeds_of(full, component)
        expected = package_runners(full.root, full.manifest)(component).run(feeds)
        actual = package_runners(cloned.root, cloned.manifest)(component).run(feeds)
        for name, value in expected.items():
            np.testing.assert_array_equal(actual[name], value, err_msg=f"{component}.{name}")


def test_each_kind_of_layer_is_traced_once(mixed: Path) -> None:
    from mcpc.export.convert import COMPUTE_DTYPE, Exporter

    checkpoint = Checkpoint.open(mixed)
    exporter = Exporter(checkpoint)
    plan = make_plan(select(checkpoint, load_templates()), exporter.config, COMPUTE_DTYPE)
    decoder = next(item for item in plan.components if item.name == "decoder")
    model = exporter.trace(decoder, plan).model
    traced = {io.module_of(node) for node in model.graph if "@" not in str(node.name)}
    cloned = {io.module_of(node) for node in model.graph if "@" in str(node.name)}
    layers = "model.language_model.layers"
    assert {f"{layers}.{number}.mlp.up_proj" for number in (0, 1)} <= traced
    assert {f"{layers}.{number}.mlp.up_proj" for number in (2, 3, 4, 5)} <= cloned
    weights = set(model.graph.initializers)
    assert {f"{layers}.{number}.self_attn.q_proj.bias" for number in range(6)} <= weights

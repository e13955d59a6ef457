"""Tensors that are made of others: the same as transformers' own converters make, with pieces of any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    ErnieFuseAndSplitTextVisionExperts,
    Interleave,
    MergeModulelist,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint import made as arithmetic
from mcpc.errors import BadInputError, UnsupportedError, UsageError
from mcpc.export.conversions import Conversion
from mcpc.graph.weights import refer_to_weights
from mcpc.package import PackageWriter
from mcpc.storage.safetensors import Plan, read_header, write_stream

CONFIG: Any = SimpleNamespace(num_attention_heads=3)
MODEL: Any = SimpleNamespace(get_parameter=lambda name: torch.empty(5, 4, 6))
EXPERTS: dict[str, tuple[int, ...]] = {
    f"m.experts.{i}.{name}.weight": (4, 6) for i in (*range(10, 1, -1), 0, 1) for name in ("gate", "up")
}


def checkpoint(root: Path, shapes: dict[str, tuple[int, ...]]) -> Checkpoint:
    random = np.random.default_rng(0)
    with (root / "model.safetensors").open("wb") as file:
        plans = [Plan(name, "float32", shape) for name, shape in shapes.items()]
        write_stream(file, plans, [random.standard_normal(shape).astype(np.float32) for shape in shapes.values()])
    return Checkpoint(root, {}, ("model.safetensors",), read_header(root / "model.safetensors"))


CASES: list[tuple[dict[str, tuple[int, ...]], list[str], list[str], list[ConversionOps]]] = [
    (EXPERTS, ["experts.*.gate.weight", "experts.*.up.weight"], ["experts.both"], [MergeModulelist(0), Concatenate(1)]),
    ({k: v for k, v in EXPERTS.items() if "up" in k}, ["experts.*.up.weight"], ["experts.up"], [MergeModulelist(0)]),
    ({"m.qkv.w": (9, 4)}, ["qkv.w"], ["q.w", "k.w", "v.w"], [Chunk(0)]),
    ({"m.q.w": (12, 5)}, ["q.w"], ["query.w"], [PermuteForRope()]),
    ({"m.qkv.w": (24, 5)}, ["qkv.w"], ["q.w", "k.w"], [Chunk(0), PermuteForRope(permute_layer_names=["k.w"])]),
    ({"m.w": (5, 6, 4)}, ["m.w"], ["m.v"], [Transpose(1, 2, check_dims=True)]),
    ({"m.w": (5, 4, 6)}, ["m.w"], ["m.v"], [Transpose(1, 2, check_dims=True)]),
    ({"m.w": (5, 4, 6)}, ["m.w"], ["m.v"], [Transpose(0, 2)]),
    ({"m.w13": (8, 5)}, ["w13"], ["gate", "up"], [Interleave(0), Chunk(0)]),
    ({"m.w13": (3, 8, 5)}, ["w13"], ["both"], [Interleave(1, inverse=True)]),
    (
        {f"m.experts.{i}.{name}.w": (4 if i < 2 else 3, 6) for i in range(4) for name in ("gate", "up")},
        ["experts.*.gate.w", "experts.*.up.w"],
        ["text.both", "vision.both"],
        [ErnieFuseAndSplitTextVisionExperts(0, 1)],
    ),
    (
        {f"m.experts.{i}.down.w": (6, 4 if i < 2 else 3) for i in range(4)},
        ["experts.*.down.w"],
        ["text.down", "vision.down"],
        [ErnieFuseAndSplitTextVisionExperts(0, 1)],
    ),
    ({"m.gate.w": (2, 3, 4), "m.up.w": (2, 5, 4)}, ["gate.w", "up.w"], ["both.w"], [Concatenate(1)]),
]


def count_of(shapes: dict[str, tuple[int, ...]], targets: list[str]) -> int:
    """Return the experts of each target: those of the file are numbered 0, 1, ..."""
    return len({name.split(".")[2] for name in shapes if "experts" in name}) // len(targets)


@pytest.mark.parametrize(("shapes", "sources", "targets", "operations"), CASES)
@pytest.mark.parametrize("piece", [1, 7, 1 << 22])
def test_same_as_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shapes: dict[str, tuple[int, ...]],
    sources: list[str],
    targets: list[str],
    operations: list[ConversionOps],
    piece: int,
) -> None:
    monkeypatch.setattr(arithmetic, "_PIECE_ELEMENTS", piece)
    opened = checkpoint(tmp_path, shapes)
    oracle, target = WeightConverter(list(sources), list(targets), operations), ""
    mine = WeightConverter(list(sources), list(targets), operations)
    conversion = None
    for key in sorted(shapes, key=lambda name: (len(name), name)):
        target, pattern = oracle.rename_source_key(key)
        assert pattern is not None
        tensor: Any = torch.from_numpy(np.array(opened.tensors[key].read()))
        oracle.add_tensor(target, key, pattern, tensor)
    conversion = Conversion(mine, target)
    for key in shapes:  # in another order: numbers decide, not the order of the file
        conversion.add(str(mine.rename_source_key(key)[1]), key)
    expected = oracle.convert(target, model=MODEL, config=CONFIG)
    assert conversion.missing({name: torch.empty(count_of(shapes, targets)) for name in conversion.targets}) == []
    made = conversion.made(CONFIG, {target: torch.empty(5, 4, 6)}, opened)
    assert {item.parameter for item in made} == set(expected)
    for item in made:
        wanted = expected[item.parameter]
        wanted = wanted[0] if isinstance(wanted, list) else wanted
        assert item.value.shape == tuple(wanted.shape)
        got = np.concatenate(list(arithmetic.pieces(item.value))).reshape(item.value.shape)
        np.testing.assert_array_equal(got, wanted.numpy())
        assert set(item.sources) == set(shapes)


def made_of(conversion: Conversion, opened: Checkpoint) -> list[arithmetic.Made]:
    return conversion.made(CONFIG, {name: torch.empty(2, 4, 6) for name in conversion.targets}, opened)


def test_experts_are_recorded_with_a_star(tmp_path: Path) -> None:
    converter = WeightConverter(["experts.*.gate.weight"], ["experts.gate"], [MergeModulelist(0)])
    conversion = Conversion(converter, "m.experts.gate")
    shapes = {name: shape for name, shape in EXPERTS.items() if "gate" in name}
    for name in shapes:
        conversion.add("experts.*.gate.weight", name)
    (made,) = made_of(conversion, checkpoint(tmp_path, shapes))
    assert made.origin == "m.experts.*.gate.weight"
    assert made.transform == "stack(0)"
    assert made.sources == (*(f"m.experts.{i}.gate.weight" for i in range(11)),)


def test_an_uneven_expert_is_refused(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"m.experts.0.w": (4, 6), "m.experts.1.w": (4, 5)}
    conversion = Conversion(WeightConverter(["experts.*.w"], ["experts.w"], [MergeModulelist(0)]), "m.experts.w")
    for name in shapes:
        conversion.add("experts.*.w", name)
    with pytest.raises(BadInputError, match="different shapes"):
        made_of(conversion, checkpoint(tmp_path, shapes))


def test_an_unknown_operation_is_refused_by_name(tmp_path: Path) -> None:
    class Fold(ConversionOps):
        def convert(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    conversion = Conversion(WeightConverter(["w"], ["v"], [Fold()]), "m.v")
    conversion.add("w", "m.w")
    with pytest.raises(UnsupportedError, match="Fold"):
        made_of(conversion, checkpoint(tmp_path, {"m.w": (2, 2)}))


def test_missing_experts_are_named() -> None:
    sources = ["experts.*.gate.weight", "experts.*.up.weight"]
    conversion = Conversion(
        WeightConverter(sources, ["experts.both"], [MergeModulelist(0), Concatenate(1)]), "m.3.both"
    )
    gone = {"m.3.experts.2.gate.weight", "m.3.experts.9.up.weight", "m.3.experts.10.up.weight"}
    for expert in range(11):
        for pattern in sources:
            name = "m.3." + pattern.replace("*", str(expert))
            if name not in gone:
                conversion.add(pattern, name)
    state = {name: torch.empty(11, 8, 6) for name in conversion.targets}
    assert conversion.missing(state) == [
        "m.3.experts.2.gate.weight",
        "m.3.experts.9.up.weight",
        "m.3.experts.10.up.weight",
    ]
    assert conversion.missing({name: torch.empty(12, 8, 6) for name in state})[-2:] == [
        "m.3.experts.11.gate.weight",
        "m.3.experts.11.up.weight",
    ]


def test_a_missing_kind_of_expert_weights_is_named_by_its_pattern() -> None:
    sources = ["experts.*.gate.weight", "experts.*.up.weight"]
    conversion = Conversion(WeightConverter(sources, ["experts.both"], [MergeModulelist(0), Concatenate(1)]), "m.both")
    conversion.add(sources[0], "m.experts.0.gate.weight")
    state = {name: torch.empty(1, 8, 6) for name in conversion.targets}
    assert conversion.missing(state) == ["experts.*.up.weight"]


UNFIT: list[tuple[tuple[int, ...], list[str], ConversionOps, str]] = [
    ((10, 4), ["q.w", "k.w", "v.w"], Chunk(0), "equal parts"),
    ((9, 4), ["q.w"], PermuteForRope(), "even number for each of 3 heads"),
    ((7, 4), ["q.w"], Interleave(0), "no two halves"),
]


@pytest.mark.parametrize(("shape", "targets", "operation", "message"), UNFIT)
def test_shapes_that_do_not_fit_are_refused_before_work(
    tmp_path: Path, shape: tuple[int, ...], targets: list[str], operation: ConversionOps, message: str
) -> None:
    conversion = Conversion(WeightConverter(["w"], targets, [operation]), "m.q.w")
    conversion.add("w", "m.w")
    with pytest.raises(BadInputError, match=message) as caught:
        made_of(conversion, checkpoint(tmp_path, {"m.w": shape}))
    assert caught.value.problems[0].got == str(list(shape))


def test_parts_of_different_width_are_not_joined(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {"m.gate.w": (3, 4), "m.up.w": (3, 5)}
    conversion = Conversion(WeightConverter(["gate.w", "up.w"], ["both.w"], [Concatenate(0)]), "m.both.w")
    for name in shapes:
        conversion.add(name.removeprefix("m."), name)
    with pytest.raises(BadInputError, match="differ beside axis 0"):
        made_of(conversion, checkpoint(tmp_path, shapes))


def test_made_tensors_cannot_stay_in_the_checkpoint(tmp_path: Path) -> None:
    opened = checkpoint(tmp_path, {"m.qkv.w": (9, 4)})
    conversion = Conversion(WeightConverter(["qkv.w"], ["q.w", "k.w", "v.w"], [Chunk(0)]), "m.q.w")
    conversion.add("qkv.w", "m.qkv.w")
    opened = replace(opened, made={item.name: item for item in made_of(conversion, opened)})
    with pytest.raises(UsageError, match="need another dtype or layout") as caught:
        refer_to_weights(opened, dict.fromkeys(opened.made, "float32"), PackageWriter(tmp_path / "package"))
    assert len(caught.value.problems) == 3

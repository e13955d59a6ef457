"""Optimization profiles: one set of named dimensions, and every contradiction refused before a build."""

from __future__ import annotations

import pytest

from mcpc.backends.trt.profiles import make_profiles, parse_profile
from mcpc.config.target import SizeRange
from mcpc.core.tensors import TensorSpec
from mcpc.errors import UnsupportedError, UsageError

INPUTS = (
    TensorSpec("embeds", "float32", ("batch", "sequence", 8)),
    TensorSpec("mask", "int64", ("batch", "past+sequence")),
    TensorSpec("past.0.key", "float32", ("batch", 2, "past", 4)),
    TensorSpec("past.1.key", "float32", ("batch", 2, "past", 4)),
)
DEFAULTS = {
    "batch": SizeRange(min=1, opt=1, max=4),
    "sequence": SizeRange(min=1, opt=32, max=64),
    "past": SizeRange(min=0, opt=16, max=128),
}


def profiles(*options: str, defaults: dict[str, SizeRange] | None = None) -> list[dict[str, object]]:
    made = make_profiles(
        "decoder", INPUTS, [parse_profile(text) for text in options], DEFAULTS if defaults is None else defaults
    )
    return [dict(profile) for profile in made]


def test_the_mask_is_always_past_plus_sequence() -> None:
    (profile,) = profiles()
    assert profile["embeds"] == ((1, 1, 8), (1, 32, 8), (4, 64, 8))
    assert profile["mask"] == ((1, 1), (1, 48), (4, 192))
    assert profile["past.0.key"] == profile["past.1.key"] == ((1, 2, 0, 4), (1, 2, 16, 4), (4, 2, 128, 4))


def test_a_static_graph_needs_none() -> None:
    assert make_profiles("part", [TensorSpec("x", "float32", (1, 2))], [], {}) == []


def test_a_dimension_and_a_shape_say_the_same() -> None:
    by_name = profiles("decoder.dim:sequence=1,4,9", "decoder.dim:batch=1,2,3")
    by_shape = profiles("decoder.embeds=1x1x8,2x4x8,3x9x8")
    assert by_name == by_shape
    assert by_shape[0]["mask"] == ((1, 1), (2, 20), (3, 137))


def test_the_past_follows_from_the_mask() -> None:
    (profile,) = profiles("decoder.embeds=1x1x8,1x4x8,1x9x8", "decoder.mask=1x1,1x10,1x29")
    assert profile["past.1.key"] == ((1, 2, 0, 4), (1, 2, 6, 4), (1, 2, 20, 4))


def test_an_option_for_all_components_skips_those_without_the_dimension() -> None:
    assert profiles("dim:images=1,1,2") == profiles()
    assert profiles("dim:batch=2,2,2")[0]["mask"] == ((2, 1), (2, 48), (2, 192))


def test_several_profiles_of_one_engine() -> None:
    prefill, decode = profiles("decoder.dim:sequence=1,32,64/1,1,1", "decoder.dim:past=0,0,0/1,16,128")
    assert prefill["mask"] == ((1, 1), (1, 32), (4, 64))
    assert decode["mask"] == ((1, 2), (1, 17), (4, 129))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            ("decoder.mask=1x1,1x40,4x192", "decoder.dim:sequence=1,32,64", "decoder.dim:past=0,16,128"),
            "the typical shape of mask",
        ),
        (
            ("decoder.past.0.key=1x2x0x4,1x2x8x4,1x2x9x4", "decoder.past.1.key=1x2x0x4,1x2x7x4,1x2x9x4"),
            "past has two sizes",
        ),
        (("decoder.embeds=1x1x9,1x4x9,1x9x9",), "the smallest shape of embeds"),
        (("decoder.embeds=1x1,1x4,1x9",), "another number of dimensions"),
        (("decoder.pixels=1,1,1",), "no such input"),
        (("decoder.dim:images=1,1,1",), "no such dimension"),
        (
            ("decoder.embeds=1x8x8,1x8x8,1x8x8", "decoder.mask=1x4,1x9,1x9"),
            "the sizes of the dimension past are negative",
        ),
        (("decoder.dim:past=0,0,0/1,1,1", "decoder.dim:batch=1,1,1/1,1,1/1,1,1"), "another number of profiles"),
    ],
)
def test_contradictions(options: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError) as caught:
        profiles(*options)
    assert any(text in str(problem) for problem in caught.value.problems)


def test_a_missing_size_names_the_options_that_would_do() -> None:
    with pytest.raises(UnsupportedError) as caught:
        profiles(defaults={"batch": DEFAULTS["batch"]})
    assert caught.value.hint == (
        "for instance --profile 'decoder.dim:sequence=1,1,4' --profile 'decoder.dim:past=1,1,4'"
    )
    assert [problem.got for problem in caught.value.problems] == ["sequence", "past"]
    assert "input embeds, mask" in caught.value.problems[0].where


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "decoder.x",
        "decoder.x=1,2",
        "decoder.x=1,2,3,4",
        "decoder.x=1x2,1,1",
        "decoder.dim:n=1x1,1x1,1x1",
        "d.x=a,b,c",
    ],
)
def test_malformed_options(text: str) -> None:
    with pytest.raises(UsageError, match="malformed --profile"):
        parse_profile(text)


def test_sizes_must_not_fall() -> None:
    with pytest.raises(UsageError, match="fall from min over opt to max"):
        parse_profile("decoder.dim:past=4,2,8")

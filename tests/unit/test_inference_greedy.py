"""Greedy decoding against transformers' own logits processors; positions against the mask."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from mcpc.core.runner import Array
from mcpc.errors import BadInputError
from mcpc.inference.cache import positions
from mcpc.inference.greedy import greedy
from mcpc.package.manifest import Generation

V, EOS = 50, 9


def walk(seed: int) -> tuple[Array, Callable[[int], Array], list[int]]:
    """Return first logits, `advance` over a fixed random table, and the list of tokens that were fed."""
    table = np.random.default_rng(seed).standard_normal((V, V)).astype(np.float32)
    fed: list[int] = []

    def advance(token: int) -> Array:
        fed.append(token)
        return np.asarray(table[token])

    return np.asarray(table[0]), advance, fed


@pytest.mark.parametrize("seed", range(5))
def test_suppression_equals_transformers(seed: int) -> None:
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    first, advance, _ = walk(seed)
    order = np.argsort(-first)
    always, begin = [int(order[0]), 3, 17], [int(order[1]), 5]
    generation = Generation(
        eos_token_ids=(EOS,), suppress_token_ids=tuple(always), begin_suppress_token_ids=tuple(begin), max_new_tokens=9
    )
    actual = [step.token for step in greedy(first, advance, generation, max_new_tokens=20, stop_at_eos=False)]

    chain = [
        processors.SuppressTokensLogitsProcessor(always),
        processors.SuppressTokensAtBeginLogitsProcessor(begin, begin_index=1),
    ]
    expected: list[int] = []
    logits = first
    for _ in range(20):
        ids = torch.tensor([[0, *expected]])
        scores = torch.from_numpy(logits.copy())[None]
        for process in chain:
            scores = process(ids, scores)
        expected.append(int(scores.argmax()))
        logits = advance(expected[-1])
    assert actual == expected
    assert actual[0] not in (int(order[0]), int(order[1]))


def test_stops_at_the_end_of_sequence_and_not_before() -> None:
    first, advance, fed = walk(1)
    free = Generation(eos_token_ids=(), max_new_tokens=1)
    tokens = [step.token for step in greedy(first, advance, free, max_new_tokens=6)]
    assert len(tokens) == 6
    assert fed == tokens[:-1]  # the last token is never fed: nobody asks what follows
    end = tokens[3]
    assert end not in tokens[:3]
    stopping = Generation(eos_token_ids=(V + 1, end), max_new_tokens=1)
    assert [step.token for step in greedy(first, advance, stopping, max_new_tokens=6)] == tokens[:4]
    assert len(list(greedy(first, advance, stopping, max_new_tokens=6, stop_at_eos=False))) == 6
    assert list(greedy(first, advance, stopping, max_new_tokens=0)) == []


def test_logits_are_those_of_the_model() -> None:
    first, advance, _ = walk(2)
    best = int(first.argmax())
    generation = Generation(eos_token_ids=(), suppress_token_ids=(best,), max_new_tokens=1)
    step = next(greedy(first, advance, generation, max_new_tokens=1))
    assert step.token != best
    np.testing.assert_array_equal(step.logits, first)
    assert np.isfinite(step.logits).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    first, advance, _ = walk(3)
    first = first.copy()
    first[7] = bad
    with pytest.raises(BadInputError, match="not finite"):
        list(greedy(first, advance, Generation(eos_token_ids=(EOS,), max_new_tokens=1), max_new_tokens=1))


def test_positions_do_not_count_padding() -> None:
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
    np.testing.assert_array_equal(positions(mask), [[0, 1, 2, 3], [0, 0, 0, 1]])
    assert positions(mask).dtype == np.int64

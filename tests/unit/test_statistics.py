"""Figures over weights: as numpy computes them in float64, whatever the dtype and however they come in pieces."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from mcpc.checkpoint.statistics import Statistics, _float32


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_figures_are_those_of_all_values(dtype: type) -> None:
    random = np.random.default_rng(5)
    first = (0.03 * random.standard_normal(200_001) + 0.01).astype(dtype)
    second = (2.0 * random.standard_normal(70_001)).astype(dtype)
    statistics = Statistics()
    for start in range(0, first.size, 90_000):
        statistics.see("first", first[start : start + 90_000])
    statistics.see("second", second)
    statistics.see("codes", np.arange(9, dtype=np.int8))
    both = np.concatenate([first, second]).astype(np.float64)
    found = statistics.of(["first", "second", "codes", "never seen"])
    assert found is not None
    # Of six digits, half a unit of the last is up to 5e-6. The mean is a small difference of large sums, so its
    # error is a share of the spread.
    assert found["std"] == pytest.approx(both.std(), rel=6e-6)
    assert abs(found["mean"] - both.mean()) < 6e-6 * both.std()
    assert found["absmax"] == pytest.approx(np.abs(both).max(), rel=6e-6)
    alone = statistics.of(["first"])
    assert alone is not None and alone["std"] == pytest.approx(first.astype(np.float64).std(), rel=6e-6)
    assert statistics.of(["codes"]) is None


def test_every_finite_float16_is_widened_exactly() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]
    assert finite.size == (1 << 16) - 2 * 1024
    assert np.array_equal(_float32(finite).view(np.uint32), finite.astype(np.float32).view(np.uint32))

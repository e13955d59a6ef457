"""Packages of the example checkpoints, converted once per test session (also under pytest-xdist)."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mcpc.core.progress import Silent

Convert = Callable[[Path], Path]


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Return a function from a checkpoint to its package, converted with `--verify none` when first asked for."""
    pytest.importorskip("torch")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packages"
    folder.mkdir(exist_ok=True)

    def convert_once(checkpoint: Path) -> Path:
        from mcpc.workflows.convert import convert

        package = folder / checkpoint.name
        with (folder / f"{checkpoint.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be converting it
            if not package.exists():
                convert(checkpoint, package, verify="none", progress=Silent())
        return package

    return convert_once


@pytest.fixture(scope="session")
def llava_package(converted: Convert, fashion_llava: Path) -> Path:
    """Package of the example LLaVA, unverified."""
    return converted(fashion_llava)


@pytest.fixture(scope="session")
def clip_package(converted: Convert, fashion_clip: Path) -> Path:
    """Package of the example CLIP, unverified."""
    return converted(fashion_clip)


@pytest.fixture(scope="session")
def whisper_package(converted: Convert, assets: Path) -> Path:
    """Package of Whisper tiny.en, unverified."""
    return converted(assets / "checkpoints" / "whisper-tiny.en")

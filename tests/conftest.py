"""Fixtures that every test folder shares: the example checkpoints, the large assets, and what this machine has."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def pytest_configure() -> None:
    """Let children be interrupted: a shell that runs the tests in the background has them ignore SIGINT for good."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest test, so that no worker waits for it at the end; skip what needs an absent GPU."""
    items.sort(key=lambda item: item.path.name != "test_coverage.py")
    if Path("/dev/nvidia0").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: /dev/nvidia0 does not exist"))


@pytest.fixture(scope="session")
def assets() -> Path:
    """Folder of the large test assets: `checkpoints/` and `data/`."""
    value = os.environ.get("MCPC_ASSETS")
    if not value:
        pytest.skip("needs large assets: set MCPC_ASSETS to a folder that holds checkpoints/ and data/ (make assets)")
    path = Path(value)
    if not (path / "checkpoints").is_dir():
        pytest.fail(f"MCPC_ASSETS is set to {value}, which holds no checkpoints/")
    return path


@pytest.fixture(scope="session")
def fashion_clip() -> Path:
    """A small real CLIP checkpoint, float32."""
    return EXAMPLES / "fashion-clip"


@pytest.fixture(scope="session")
def fashion_llava() -> Path:
    """A small real LLaVA checkpoint, bfloat16."""
    return EXAMPLES / "fashion-llava"


@pytest.fixture(scope="session")
def example_images() -> dict[str, Path]:
    """One real test image per class of Fashion-MNIST, by class name."""
    return {path.stem: path for path in sorted((EXAMPLES / "images").glob("*.png"))}

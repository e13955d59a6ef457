"""A base install, without any extra, imports every module but the exporter and says which extra a command needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent.parent / "src"
#: Top-level packages that only an extra brings, directly or by dependency.
EXTRA_ONLY = (
    "torch", "transformers", "onnxscript", "safetensors", "tensorrt_rtx", "tensorrt", "tensorrt_llm", "hypothesis",
    "pytest", "onnx_graphsurgeon", "cryptography", "scipy", "torchvision",
)  # fmt: skip
#: Modules that need an extra by their nature: the exporter, and the child process in which TensorRT builds.
NEED_AN_EXTRA = ("mcpc.export", "mcpc.backends.trt.worker")
HOOK = f"""
import importlib.abc, sys

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRA_ONLY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Forbid())
"""


@pytest.fixture
def base_environment(tmp_path: Path) -> dict[str, str]:
    """Environment of a process in which the extras cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def modules() -> list[str]:
    """Return every module of mcpc that a base install must import."""
    paths = (path.relative_to(SOURCE).with_suffix("") for path in sorted((SOURCE / "mcpc").rglob("*.py")))
    names = (".".join(part for part in path.parts if part != "__init__") for path in paths)
    return [name for name in names if not name.endswith("__main__") and not name.startswith(NEED_AN_EXTRA)]


def test_the_hook_works(base_environment: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import torch"], env=base_environment, capture_output=True, text=True
    )
    assert "ModuleNotFoundError" in result.stderr


def test_every_module_imports_in_a_base_install(base_environment: dict[str, str]) -> None:
    names = modules()
    assert len(names) > 40
    script = f"""
import importlib
for name in {names!r}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{{name}}: {{error}}")
"""
    result = subprocess.run([sys.executable, "-c", script], env=base_environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_a_command_without_its_extra_says_which_one(
    base_environment: dict[str, str], fashion_clip: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "mcpc", "convert", str(fashion_clip), "-o", str(tmp_path / "out")]
    result = subprocess.run(command, env=base_environment, capture_output=True, text=True)
    assert result.returncode == 6
    assert 'hint: pip install "mcpc[export]"' in result.stderr
    assert not (tmp_path / "out").exists()

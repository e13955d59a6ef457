"""The wheel builds from the sources and carries what mcpc reads at run time."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
               "--disable-pip-version-check", "--wheel-dir", str(folder), str(ROOT)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (path,) = folder.glob("mcpc-*.whl")
    return path


def test_it_carries_every_template_and_schema(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("templates", "schemas"):
        files = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert files
        assert {f"mcpc/_data/{path.relative_to(ROOT).as_posix()}" for path in files} <= names
    assert {"mcpc/py.typed", "mcpc/_data/docs/coverage.json"} <= names
    assert not [name for name in names if name.startswith(("tests", "examples"))]


def test_it_works_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site packages"
    zipfile.ZipFile(wheel).extractall(site)
    script = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); import mcpc; print(mcpc.__file__, file=sys.stderr);"
        "from mcpc.cli.app import main; main()"
    )
    command = [sys.executable, "-c", script, str(site), "templates", "list"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith(str(site))
    assert "llava" in result.stdout

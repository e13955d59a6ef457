"""The coverage table: a rotating window of its rows is converted again; a name without a template is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def coverage(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "coverage.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_rotating_rows_keep_their_status() -> None:
    done = coverage("--check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("verified") >= 5


def test_a_type_without_a_template_is_refused_by_name(tmp_path: Path) -> None:
    rows = json.loads((ROOT / "docs" / "coverage.json").read_text())["rows"]
    refused = next(row for row in rows if row["status"] == "refused" and row["reason"].startswith("no template"))
    done = coverage("--check", "--only", refused["model_type"], "--keep", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / f"{refused['model_type']}-{refused['architecture']}" / "package.out").read_text())
    assert document["exit_code"] == 4
    assert refused["architecture"] in document["message"]


def test_every_listed_type_has_a_row() -> None:
    script = "import coverage, json; print(json.dumps(list(coverage.listed_types())))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT / "benchmarks")
    listed = {tuple(key) for key in json.loads(done.stdout)}
    rows = json.loads((ROOT / "docs" / "coverage.json").read_text())["rows"]
    assert {(row["model_type"], row["architecture"]) for row in rows} == listed
    assert all(row["reason"] or row["status"] == "verified" for row in rows)
    assert len({row["model_type"] for row in rows}) == 139

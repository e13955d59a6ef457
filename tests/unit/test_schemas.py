"""The JSON Schemas are those of the types, and the drift check sees every kind of drift."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def run_tool(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the tool, whose schemas stand in `folder/schemas`."""
    (folder / "tools").mkdir(exist_ok=True)
    tool = folder / "tools" / "make_schemas.py"
    tool.write_bytes((ROOT / "tools" / "make_schemas.py").read_bytes())
    return subprocess.run([sys.executable, str(tool), *arguments], capture_output=True, text=True)


def test_the_schemas_are_up_to_date(tmp_path: Path) -> None:
    assert run_tool(tmp_path).returncode == 0
    fresh = {path.name: path.read_text() for path in (tmp_path / "schemas").iterdir()}
    assert {path.name: path.read_text() for path in (ROOT / "schemas").iterdir()} == fresh, "run: make schemas"


def test_drift_is_seen(tmp_path: Path) -> None:
    run_tool(tmp_path)
    assert run_tool(tmp_path, "--check").returncode == 0
    schema = tmp_path / "schemas" / "manifest.json"
    schema.write_text(schema.read_text().replace("kv_cache", "kv_cash", 1))
    (tmp_path / "schemas" / "target.json").unlink()
    (tmp_path / "schemas" / "old.json").write_text("{}")
    result = run_tool(tmp_path, "--check")
    assert result.returncode == 1
    findings = ["target.json: missing", "old.json: made from no type", "manifest.json: differs from its type"]
    assert result.stdout.splitlines() == [*findings, "run: make schemas"]


def test_a_schema_refuses_unknown_keys() -> None:
    manifest = json.loads((ROOT / "schemas" / "manifest.json").read_text())
    assert manifest["additionalProperties"] is False
    assert all(
        kind.get("additionalProperties") is False for kind in manifest["$defs"].values() if kind["type"] == "object"
    )

"""`mcpc templates coverage`: installed templates against the measured table; a reason of its own for every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mcpc.errors import InternalError
from mcpc.resources import coverage_file
from mcpc.templates.coverage import Table, cover, read_table
from mcpc.templates.match import load_refusals, load_templates

ROOT = Path(__file__).resolve().parent.parent.parent
TEMPLATES = load_templates()
TABLE = read_table(coverage_file())


def status_of(table: Table, model_type: str, templates: tuple[object, ...] = TEMPLATES) -> tuple[str, str]:
    (entry,) = [entry for entry in cover(table, templates, {}) if entry.row.model_type == model_type]  # type: ignore[arg-type]
    return entry.status, entry.reason


def test_the_committed_table_is_that_of_the_installed_templates() -> None:
    for entry in cover(TABLE, TEMPLATES, load_refusals()):
        assert (entry.status, entry.template) == (entry.row.status, entry.row.template), entry.row.model_type
        if entry.status == "refused":
            assert entry.row.reason == f"no template for architecture {entry.row.architecture}: {entry.reason}"[:200]


def test_reasons_are_given_for_refused_types_and_no_others() -> None:
    refused = {row.model_type for row in TABLE.rows if row.status == "refused"}
    served = {row.model_type for row in TABLE.rows if row.status == "verified"}
    assert set(load_refusals()) == refused - served


def test_a_type_whose_template_is_gone_is_refused() -> None:
    rest = tuple(template for template in TEMPLATES if template.meta.name != "siglip")
    assert status_of(TABLE, "siglip", rest) == ("refused", "no template for SiglipModel")


def test_a_template_that_the_table_does_not_know_is_unmeasured() -> None:
    rows = tuple(replace(row, template="siglip@0.9.0") if row.model_type == "siglip" else row for row in TABLE.rows)
    table = Table(TABLE.versions, rows)
    assert status_of(table, "siglip") == ("unmeasured", "the table was made without siglip@1.0.0")
    (entry,) = [entry for entry in cover(table, TEMPLATES, {}) if entry.row.model_type == "siglip"]
    assert entry.to_dict()["largest_error"] is None


def test_a_failure_of_the_table_stays_one() -> None:
    rows = tuple(replace(row, status="failed", reason="broken") for row in TABLE.rows if row.model_type == "siglip")
    assert status_of(Table(TABLE.versions, rows), "siglip") == ("failed", "broken")


def test_a_damaged_table_is_a_fault_of_the_installation(tmp_path: Path) -> None:
    path = tmp_path / "coverage.json"
    for text in ("{", '{"versions": {}}', '{"versions": {}, "rows": [{"model_type": "clip", "tasks": []}]}'):
        path.write_text(text)
        with pytest.raises(InternalError, match="the coverage table cannot be read"):
            read_table(path)


def test_the_command_agrees_with_the_page_and_imports_no_torch() -> None:
    script = (
        "import sys; from mcpc.cli.app import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, 'onnx' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "templates", "coverage", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["False", "False"]
    document = json.loads(done.stdout)
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    types, rows = document["types"], document["architectures"]
    assert f"**{types['verified']} of {types['listed']} model types verified.**" in page
    assert f"{rows['listed']} architectures: {rows['verified']} verified, {rows['refused']} refused" in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{types['verified']} of {types['listed']} convert" in readme
    assert len(document["rows"]) == rows["listed"]
    assert document["largest_error"] < 1e-4

"""`mcpc templates coverage`: the installed templates against the multimodal types that transformers lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mcpc.core.report import Report
from mcpc.resources import coverage_file
from mcpc.templates.coverage import Entry, cover, read_table
from mcpc.templates.match import load_refusals, load_templates
from mcpc.workflows.environment import tool_versions


def list_coverage() -> Report:
    """Return every listed type with the template that serves it or the reason why none does; imports no torch."""
    table = read_table(coverage_file())
    entries = cover(table, load_templates(), load_refusals())
    return Report(
        "templates coverage",
        data={
            "types": _totals(entries, by_type=True),
            "architectures": _totals(entries, by_type=False),
            "largest_error": max((e.row.largest_error or 0.0 for e in entries if e.status == "verified"), default=None),
            "measured_with": dict(table.versions),
            "installed_transformers": tool_versions().get("transformers"),
            "rows": [entry.to_dict() for entry in entries],
        },
    )


def _totals(entries: Sequence[Entry], *, by_type: bool) -> dict[str, Any]:
    """Count rows, or model types: a type counts as the best of its rows."""
    order = ("refused", "failed", "unmeasured", "verified")
    best: dict[tuple[str, str], str] = {}
    for entry in entries:
        key = (entry.row.model_type, "" if by_type else entry.row.architecture)
        best[key] = max(best.get(key, order[0]), entry.status, key=order.index)
    counts = Counter(best.values())
    return {"listed": len(best), **{status: counts[status] for status in reversed(order)}}

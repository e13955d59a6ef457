"""docs/coverage.md from docs/coverage.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

_HEAD = """# Coverage

Every model type that transformers lists for image-text-to-text, multimodal language models, speech sequence-to-sequence
and zero-shot image classification. For each, `benchmarks/coverage.py` makes a tiny checkpoint (`benchmarks/tiny/`: at
least two layers of every kind, random weights large enough to matter, a real tokenizer), runs `mcpc convert`, which
compares every component and the whole model with PyTorch at several sizes, and writes this file. CI converts ten of
them again each day and compares.

- **verified**: converted; every output within the gate (1e-4, or float64 as the judge).
- **refused**: exit code 4 and the reason; nothing is written.
- **failed**: anything else, a fault to be mended; nothing is written either.
"""


def render(document: Mapping[str, Any]) -> str:
    """Return the Markdown page of a coverage document."""
    rows = document["rows"]
    counts = Counter(row["status"] for row in rows)
    types = {row["model_type"] for row in rows}
    verified = {row["model_type"] for row in rows if row["status"] == "verified"}
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    summary = ", ".join(f"{counts[status]} {status}" for status in ("verified", "refused", "failed"))
    lines = [
        _HEAD,
        f"**{len(verified)} of {len(types)} model types verified.** {len(rows)} architectures: {summary}.",
        f"Made with {versions}.",
        "",
        "| model type | architecture | status | template | largest error | package | reason |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = "" if row["largest_error"] is None else f"{row['largest_error']:.0e}"
        if row["judged_by_float64"]:
            error += f" ({row['judged_by_float64']} judged by float64)"
        digest = f"`{row['digest'][:15]}`" if row["digest"] else ""
        reason = row["reason"].replace("|", "\\|")
        cells = (row["model_type"], row["architecture"], row["status"], row["template"], error, digest, reason)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"

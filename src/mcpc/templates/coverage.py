"""Which of the multimodal types of transformers the installed templates serve, beside the figures that were measured.

`docs/coverage.json` ships with mcpc: its rows are the types that transformers lists, each with what became of a tiny
checkpoint of it. `benchmarks/coverage.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mcpc.config.template import Template
from mcpc.errors import InternalError

Status = Literal["verified", "refused", "failed", "unmeasured"]


@dataclass(frozen=True)
class Row:
    """What became of one architecture of a model type.

    Attributes:
        model_type: As in config.json.
        architecture: Class of transformers.
        tasks: The lists of transformers that name it.
        status: verified, refused (exit code 4, by name, with the reason) or failed (anything else).
        reason: Why it is not verified.
        template: Which template made the package.
        largest_error: Largest absolute difference of any output from PyTorch, the whole model's included.
        judged_by_float64: Outputs where PyTorch's own float32 is further from float64 than the gate allows.
        digest: Of the package.
    """

    model_type: str
    architecture: str
    tasks: tuple[str, ...]
    status: str
    reason: str = ""
    template: str = ""
    largest_error: float | None = None
    judged_by_float64: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Table:
    """The measured rows, and the versions that they were measured with."""

    versions: Mapping[str, str]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Entry:
    """What the installed templates make of one row.

    Attributes:
        row: As measured.
        template: The installed template that fits its type and architecture; "" when none does.
        status: verified; refused (no template fits); failed; or unmeasured (the table is older than the template).
        reason: Why it is not verified.
    """

    row: Row
    template: str
    status: Status
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data, with what holds for the installed templates."""
        measured = asdict(self.row)
        if self.status != "verified":
            measured |= {"largest_error": None, "judged_by_float64": 0, "digest": ""}
        return {**measured, "status": self.status, "reason": self.reason, "template": self.template}


def read_table(path: Path) -> Table:
    """Return the rows of a coverage file.

    Raises:
        InternalError: It is not what `benchmarks/coverage.py` writes.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(Row(**{**row, "tasks": tuple(row["tasks"])}) for row in document["rows"])
        return Table(document["versions"], rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InternalError("the coverage table cannot be read", where=str(path), got=str(error)) from error


def cover(table: Table, templates: Sequence[Template], refusals: Mapping[str, str]) -> tuple[Entry, ...]:
    """Return what the templates make of every row; `refusals` says by model type why there is none."""
    return tuple(_entry(row, templates, refusals) for row in table.rows)


def _entry(row: Row, templates: Sequence[Template], refusals: Mapping[str, str]) -> Entry:
    fitting = [template.id for template in templates if _fits(template, row)]
    if not fitting:
        return Entry(row, "", "refused", refusals.get(row.model_type, f"no template for {row.architecture}"))
    template = row.template if row.template in fitting else fitting[0]
    if row.status == "verified" and row.template == template:
        return Entry(row, template, "verified", "")
    if row.status == "failed":
        return Entry(row, template, "failed", row.reason)
    return Entry(row, template, "unmeasured", f"the table was made without {template}")


def _fits(template: Template, row: Row) -> bool:
    types = template.match.config.get("model_type", (row.model_type,))
    return row.architecture in template.match.architectures and row.model_type in types

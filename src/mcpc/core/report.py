"""What a command found and did: plain JSON data that `cli` renders and `--json` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REPORT_VERSION = "1.0"


@dataclass(frozen=True)
class Report:
    """Result of one command.

    Attributes:
        command: The command's name.
        checked: `executed`, `lowered` or `none`; "" for a command that only reads.
        data: JSON-ready fields of this command.
    """

    command: str
    checked: str = ""
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the one JSON document of the command."""
        document: dict[str, Any] = {"report_version": REPORT_VERSION, "command": self.command}
        if self.checked:
            document["checked"] = self.checked
        return document | self.data

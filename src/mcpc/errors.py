"""The error tree and the exit codes. Standard library only: every other module may import this one.

An error says what failed, where, what was expected and what was got, and carries a hint that can be
acted on. Several problems of one file are reported together, as one error with several `problems`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """Process exit codes of the `mcpc` command; the one place that defines them."""

    DONE = 0
    USAGE = 2
    BAD_INPUT = 3
    UNSUPPORTED = 4
    VERIFICATION_FAILED = 5
    BACKEND = 6
    STORAGE = 7
    INTERNAL = 70
    INTERRUPTED = 130


@dataclass(frozen=True)
class Problem:
    """One finding: what is wrong, where, and what was expected and got."""

    message: str
    where: str = ""
    expected: str = ""
    got: str = ""
    code: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        if self.expected or self.got:
            text += f" (expected {self.expected or '-'}, got {self.got or '-'})"
        return f"{text} [{self.code}]" if self.code else text


@dataclass
class McpcError(Exception):
    """Base of every expected failure. Subclasses fix the exit code.

    Attributes:
        message: One line: what failed.
        where: File, component, pass, node or tensor.
        expected: What would have been right.
        got: What was found.
        hint: A command or an edit that helps.
        problems: Every finding, when there is more than one.
        details: Extra machine-readable fields for `--json`.
    """

    message: str
    where: str = ""
    expected: str = ""
    got: str = ""
    hint: str = ""
    problems: Sequence[Problem] = ()
    details: dict[str, Any] = field(default_factory=dict)

    exit_code = ExitCode.INTERNAL

    def __str__(self) -> str:
        return str(Problem(self.message, self.where, self.expected, self.got))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON data."""
        return {
            "error": type(self).__name__,
            "exit_code": int(self.exit_code),
            "message": self.message,
            "where": self.where,
            "expected": self.expected,
            "got": self.got,
            "hint": self.hint,
            "problems": [asdict(problem) for problem in self.problems],
            "details": self.details,
        }


class UsageError(McpcError):
    """The command line asks for something contradictory or impossible."""

    exit_code = ExitCode.USAGE


class BadInputError(McpcError):
    """A checkpoint, package, recipe, template or data file is damaged or inconsistent."""

    exit_code = ExitCode.BAD_INPUT


class UnsupportedError(McpcError):
    """The architecture, op, dtype or target is not supported."""

    exit_code = ExitCode.UNSUPPORTED


class VerificationError(McpcError):
    """The outputs were compared and differ by more than the gate allows."""

    exit_code = ExitCode.VERIFICATION_FAILED


class BackendError(McpcError):
    """A backend is missing, or its build failed."""

    exit_code = ExitCode.BACKEND


class StorageError(McpcError):
    """Disk full, permission denied, or another failure of the file system."""

    exit_code = ExitCode.STORAGE


class InternalError(McpcError):
    """A fault in mcpc itself."""

    exit_code = ExitCode.INTERNAL

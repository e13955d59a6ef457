"""The error tree: exit codes, text, and the JSON form."""

from __future__ import annotations

import json

import pytest

from mcpc import errors
from mcpc.errors import ExitCode, McpcError, Problem

CODES = {
    errors.UsageError: 2,
    errors.BadInputError: 3,
    errors.UnsupportedError: 4,
    errors.VerificationError: 5,
    errors.BackendError: 6,
    errors.StorageError: 7,
    errors.InternalError: 70,
}


def test_the_exit_codes_are_those_that_are_documented() -> None:
    assert {kind: int(kind.exit_code) for kind in CODES} == CODES
    assert set(CODES) == set(McpcError.__subclasses__())
    assert int(ExitCode.DONE) == 0
    assert int(ExitCode.INTERRUPTED) == 130


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: kind.__name__)
def test_an_error_survives_json(kind: type[McpcError]) -> None:
    error = kind("it broke", "file.onnx", "4", "5", "mend it", (Problem("a", "b", "c", "d", "E"),), {"n": 1})
    value = json.loads(json.dumps(error.to_dict()))
    assert value == {
        "error": kind.__name__, "exit_code": CODES[kind], "message": "it broke", "where": "file.onnx", "expected": "4",
        "got": "5", "hint": "mend it", "details": {"n": 1},
        "problems": [{"message": "a", "where": "b", "expected": "c", "got": "d", "code": "E"}],
    }  # fmt: skip


def test_the_text_says_where_what_expected_and_got() -> None:
    assert str(McpcError("truncated", "a.safetensors", "8 bytes", "3")) == (
        "a.safetensors: truncated (expected 8 bytes, got 3)"
    )
    assert str(McpcError("truncated")) == "truncated"
    assert str(Problem("no such op", "node_7", code="OP")) == "node_7: no such op [OP]"

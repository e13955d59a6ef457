"""Every way in which a command can end: one clear line, the right exit code, and one JSON document when asked for."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from mcpc.cli.console import execute, stream
from mcpc.cli.display import JsonLines, Quiet, log_format, make_display
from mcpc.cli.live import Live
from mcpc.core.progress import Progress
from mcpc.core.report import Report
from mcpc.errors import BadInputError, Problem, UnsupportedError, VerificationError


@pytest.fixture(autouse=True)
def _logs_of_faults_go_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def render(console: Console, report: Report) -> None:
    console.print(f"answer {report.data['answer']}")


def fail_with(error: BaseException) -> Callable[[Progress], Report]:
    def work(_: Progress) -> Report:
        raise error

    return work


def run(work: Callable[[Progress], Report], json_output: bool = False) -> int:
    """Return the exit code of a command."""
    try:
        execute("test", work, render, json_output)
    except SystemExit as leaving:
        assert isinstance(leaving.code, int)
        return leaving.code
    return 0


def test_a_result_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda _: Report("test", data={"answer": 42})) == 0
    assert capsys.readouterr() == ("answer 42\n", "")


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda _: Report("test", "executed", {"answer": 42}), json_output=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"report_version": "1.0", "command": "test", "checked": "executed", "answer": 42}
    assert err == ""


def test_an_expected_error_lists_every_problem_and_the_hint(capsys: pytest.CaptureFixture[str]) -> None:
    problems = (Problem("missing", "a.weight"), Problem("wrong shape", "b.weight", "[4]", "[5]"))
    error = BadInputError("2 tensors do not fit", "model [1].safetensors", problems=problems, hint="download it again")
    assert run(fail_with(error)) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "error: model [1].safetensors: 2 tensors do not fit",
        "  a.weight: missing",
        "  b.weight: wrong shape (expected [4], got [5])",
        "hint: download it again",
    ]


@pytest.mark.parametrize(("error", "code"), [(UnsupportedError("x"), 4), (VerificationError("x"), 5)])
def test_the_exit_code_is_that_of_the_error(error: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fail_with(error)) == code
    assert capsys.readouterr().err == "error: x\n"


def test_an_error_in_json_is_the_same_fields(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fail_with(BadInputError("no", "here", hint="do that")), json_output=True) == 3
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert (document["error"], document["exit_code"], document["hint"]) == ("BadInputError", 3, "do that")
    assert err.startswith("error: here: no")


def test_a_full_disk_is_a_storage_error(capsys: pytest.CaptureFixture[str]) -> None:
    def work(_: Progress) -> Report:
        with open("/dev/full", "w") as file:  # noqa: PTH123 (the device that is always full)
            file.write("x")
        return Report("test")

    assert run(work) == 7
    assert "No space left on device" in capsys.readouterr().err


def test_a_fault_writes_a_log_and_shows_no_traceback(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(fail_with(ZeroDivisionError("one\ntwo"))) == 70
    err = capsys.readouterr().err
    assert "error: a fault in mcpc: ZeroDivisionError: one" in err
    assert "Traceback" not in err
    (log,) = tmp_path.glob("mcpc-test-*.log")
    assert str(log) in err
    text = log.read_text()
    assert "Traceback" in text
    assert "raise error" in text


def test_an_oserror_without_errno_is_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fail_with(OSError("a library says so"))) == 70
    assert "a fault in mcpc" in capsys.readouterr().err


def test_a_result_that_is_no_json_is_a_fault_and_not_half_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda _: Report("test", data={"answer": float("nan")}), json_output=True) == 70
    assert json.loads(capsys.readouterr().out)["error"] == "InternalError"


def test_interrupted_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(fail_with(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


EXEC_MODULE = """
import os, signal
from mcpc.cli.console import execute

def work(progress):
    exec("os.kill(os.getpid(), signal.SIGINT); signal.pause()")

execute("test", work, lambda console, report: None, False)
"""


def test_interrupted_within_exec_of_a_module_is_130(tmp_path: Path) -> None:
    """Only `python -m` lets Python's own idea of an interrupt win over the exit code."""
    (tmp_path / "interrupted.py").write_text(EXEC_MODULE)
    command = [sys.executable, "-m", "interrupted"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (130, "error: interrupted\n")


STAGING_SCRIPT = """
import sys, time
from pathlib import Path
from mcpc.cli.console import execute
from mcpc.storage.directories import staged_directory

def work(progress):
    with staged_directory(Path(sys.argv[1])) as staging:
        (staging / "half").write_text("half")
        print("ready", flush=True)
        time.sleep(60)

execute("test", work, lambda console, report: None, False)
"""


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_leaves_nothing_behind(number: signal.Signals, word: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STAGING_SCRIPT, str(tmp_path / "out put")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert any(tmp_path.iterdir())
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err == f"error: {word}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_early_is_no_failure() -> None:
    script = textwrap.dedent("""
        import sys
        from mcpc.cli.console import execute
        from mcpc.core.report import Report
        execute("test", lambda _: Report("test", data={"a": "x" * 10_000_000}), lambda c, r: None, True)
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(20) == 0
    process.stderr.close()


def test_progress_is_quiet_in_a_file_and_json_lines_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(make_display(), Quiet)
    token = log_format.set("jsonl")
    try:
        display = make_display()
        assert isinstance(display, JsonLines)
        display.stage("tracing", "decoder")
        display.advance(1, 3, "layer")
    finally:
        log_format.reset(token)
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event["event"] for event in events] == ["stage", "advance"]
    assert events[1].items() >= {"done": 1, "total": 3, "what": "layer"}.items()


def test_a_terminal_gets_one_line_per_finished_stage(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    display = Live(Console(file=screen, force_terminal=True, width=100, color_system=None))
    display.stage("tracing", "[decoder]")
    display.advance(1, 2)
    time.sleep(0.01)
    stream(display, "text")
    display.close()
    finished = [line for line in screen.getvalue().splitlines() if "✓" in line]
    assert len(finished) == 1
    assert "✓ tracing [decoder]" in finished[0]
    assert capsys.readouterr().out == "text"


def test_colour_is_left_out_when_asked() -> None:
    script = textwrap.dedent("""
        from mcpc.cli.console import execute
        def work(progress): raise OSError(28, "full", "/x")
        execute("test", work, print, False)
    """)
    environment = os.environ | {"NO_COLOR": "1", "FORCE_COLOR": "", "TERM": "xterm-256color"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.returncode == 7
    assert result.stderr == "error: /x: full\n"

"""Run a command: progress on stderr, its result on stdout, every failure one clear line and the right exit code.

Expected failures (`McpcError`), interruptions and faults of mcpc are three different things: the first says what
to do, the second leaves nothing behind, the third writes a log that can be pasted into a bug report.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from mcpc import __version__
from mcpc.cli.display import Display, make_display
from mcpc.core.progress import Progress
from mcpc.core.report import REPORT_VERSION, Report
from mcpc.errors import BackendError, ExitCode, InternalError, McpcError, StorageError

Work = Callable[[Progress], Report]
Render = Callable[[Console, Report], None]

_WIDTH_OF_FILES = 1000
#: Module that is not part of the base install -> the extra that brings it.
_EXTRAS = {
    "torch": "export",
    "transformers": "export",
    "onnxscript": "export",
    "tensorrt_rtx": "rtx",
    "tensorrt": "tensorrt",
    "tensorrt_llm": "tensorrt-llm",
}


class Interrupted(KeyboardInterrupt):
    """SIGINT, as a class of its own.

    Python lets a plain KeyboardInterrupt that passed through `exec` (a dataclass being made is enough) override the
    exit code, although it was caught later.
    """


class Terminated(KeyboardInterrupt):
    """SIGTERM: unwinds like Ctrl-C, so that staging folders are removed."""


_SIGNALS: dict[signal.Signals, type[KeyboardInterrupt]] = {
    signal.SIGINT: Interrupted,
    signal.SIGTERM: Terminated,
}


def execute(command: str, work: Work, render: Render, json_output: bool) -> None:
    """Do the work of one command and show its report.

    Args:
        command: The command's name, for the JSON document and the fault log.
        work: Does it; stages go to the given progress.
        render: Prints the human view of the report on stdout.
        json_output: Print one JSON document instead, also for an error.

    Raises:
        SystemExit: The command failed; the code is one of `ExitCode`.
    """
    display = make_display()
    with reporting_failures(command, json_output, display):
        with _interruptible():
            report = work(display)
        display.close()
        with _reader_may_leave():
            if json_output:
                print_json(report.to_dict())
            else:
                render(_result_console(), report)
            sys.stdout.flush()


def stream(progress: Progress, text: str) -> None:
    """Write a piece of the result to stdout at once, with the live progress line out of the way."""
    close = getattr(progress, "close", None)
    if close is not None:
        close()
    sys.stdout.write(text)
    sys.stdout.flush()


def _result_console() -> Console:
    """Return the console of stdout; nothing is cut or wrapped when it is a file or a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    return console


def print_json(document: dict[str, Any]) -> None:
    """Print the one JSON document of a command."""
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


@contextlib.contextmanager
def reporting_failures(command: str, json_output: bool, display: Display | None = None) -> Iterator[None]:
    """Turn every exception of the block into one clear message and the process exit code."""
    try:
        yield
    except (SystemExit, typer.Exit):
        raise
    except BaseException as error:  # noqa: BLE001 (the one place where a fault must not become a traceback)
        if display is not None:
            display.close()
        if isinstance(error, (KeyboardInterrupt, typer.Abort)):
            cause = "terminated" if isinstance(error, Terminated) else "interrupted"
            _fail(command, json_output, {"error": "Interrupted", "message": cause}, ExitCode.INTERRUPTED)
        _fail_with(command, json_output, _expected(error) or _fault(command, error))


def _expected(error: BaseException) -> McpcError | None:
    """Return the error to show for an expected failure, or None for a fault of mcpc."""
    if isinstance(error, McpcError):
        return error
    if isinstance(error, OSError) and error.errno is not None:  # libraries raise OSError without errno for other things
        return StorageError(error.strerror or str(error), where=str(error.filename or ""))
    module = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else ""
    if extra := _EXTRAS.get(module):
        return BackendError(f"this command needs {module}", hint=f'pip install "mcpc[{extra}]"')
    return None


def _fault(command: str, error: BaseException) -> McpcError:
    summary = str(error).strip().splitlines()[:1]
    return InternalError(
        ": ".join(["a fault in mcpc", type(error).__name__, *summary]),
        hint=f"please report it with its log: {_write_log(command, error)}",
    )


def _write_log(command: str, error: BaseException) -> str:
    """Write the traceback and the environment to a new file and return its path."""
    lines = [
        f"mcpc {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"command: {command}",
        f"arguments: {sys.argv[1:]!r}",
        f"folder: {os.getcwd()}",
        "",
        "".join(traceback.format_exception(error)),
    ]
    try:
        handle, path = tempfile.mkstemp(prefix=f"mcpc-{command or 'fault'}-", suffix=".log", text=True)
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(lines))
    except OSError as problem:
        return f"no log: {problem}"
    return path


def _fail_with(command: str, json_output: bool, error: McpcError) -> NoReturn:
    _fail(command, json_output, error.to_dict(), error.exit_code, [str(problem) for problem in error.problems])


def _fail(
    command: str, json_output: bool, fields: dict[str, Any], code: ExitCode, problems: list[str] | None = None
) -> NoReturn:
    """Print the error line, its problems and its hint on stderr, the JSON document on stdout, and exit."""
    if json_output:
        with _reader_may_leave():
            print_json({"report_version": REPORT_VERSION, "command": command, **fields, "exit_code": int(code)})
            sys.stdout.flush()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    shown = McpcError(fields["message"], fields.get("where", ""), fields.get("expected", ""), fields.get("got", ""))
    console.print(Text.assemble(("error: ", "bold red"), str(shown)))
    for problem in problems or ():
        console.print(Text(f"  {problem}"))
    if fields.get("hint"):
        console.print(Text.assemble(("hint: ", "bold"), fields["hint"]))
    raise SystemExit(int(code))


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGINT and SIGTERM unwind the block; a signal that the parent had us ignore stays ignored."""

    def unwind(number: int, _frame: FrameType | None) -> NoReturn:
        raise _SIGNALS[signal.Signals(number)]

    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, unwind) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Let the reader of stdout close it early (`mcpc inspect X | head`): the work is done all the same."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

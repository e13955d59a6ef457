"""The typer application: a literal table of the commands. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from mcpc import __version__
from mcpc.cli.build_engine import build_engine
from mcpc.cli.compile import compile  # noqa: A004 (the command's name)
from mcpc.cli.console import reporting_failures
from mcpc.cli.convert import convert
from mcpc.cli.display import LogFormat, log_format
from mcpc.cli.inspect import inspect
from mcpc.cli.lists import recipes, targets, templates
from mcpc.cli.quantize import quantize
from mcpc.cli.run import run
from mcpc.cli.verify import verify
from mcpc.errors import UsageError

app = typer.Typer(
    name="mcpc",
    help="Compile multimodal models offline: Hugging Face checkpoint -> verified ONNX package -> TensorRT engines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: rich's would double the time of `mcpc --help`
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

#: The commands in the order of `mcpc --help`.
COMMANDS: tuple[Callable[..., None], ...] = (convert, quantize, build_engine, verify, run, inspect, compile)

#: Groups of `list` and `show`.
GROUPS: tuple[typer.Typer, ...] = (templates, recipes, targets)

for _command in COMMANDS:
    app.command(name=_command.__name__.replace("_", "-"), no_args_is_help=True)(_command)
for _group in GROUPS:
    app.add_typer(_group)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mcpc {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    log: Annotated[LogFormat, typer.Option("--log-format", help="How progress is written to stderr.")] = "text",
) -> None:
    """Compile multimodal models offline: Hugging Face checkpoint -> verified ONNX package -> TensorRT engines."""
    log_format.set(log)


def main() -> NoReturn:
    """Run the command line and exit with one of `mcpc.errors.ExitCode`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without UTF-8 is no reason to fail
    with reporting_failures("", "--json" in sys.argv):
        try:
            code = app(prog_name="mcpc", standalone_mode=False)
        except typer.TyperException as error:
            if error.format_message().startswith("Usage:"):  # a command without arguments: this is its help
                typer.echo(error.format_message(), err=True)
                raise SystemExit(error.exit_code) from None
            context = getattr(error, "ctx", None)
            hint = f"{context.command_path} --help" if context else "mcpc --help"
            raise UsageError(error.format_message(), hint=hint) from None
    raise SystemExit(code or 0)

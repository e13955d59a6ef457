"""The command line itself: help is fast and light, usage errors exit 2, lists show what ships."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from mcpc import __version__

HEAVY = ("torch", "transformers", "onnx", "onnx_ir", "onnxruntime", "numpy", "pydantic", "yaml", "tensorrt_rtx")
HELP_LIMIT_S = 0.5


def mcpc(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "mcpc", *arguments], capture_output=True, text=True)


def test_help_imports_nothing_heavy() -> None:
    script = f"""
import sys
sys.argv = ["mcpc", "--help"]
from mcpc.cli.app import main
try:
    main()
finally:
    print("HEAVY", sorted(set(sys.modules) & set({HEAVY!r})))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == "HEAVY []"


def test_help_is_fast() -> None:
    """Processor time, not wall time: the other processes of a busy machine are not the command's fault."""
    times_s = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert mcpc("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times_s.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times_s) < HELP_LIMIT_S


def test_version() -> None:
    assert mcpc("--version").stdout == f"mcpc {__version__}\n"


def test_every_command_has_help() -> None:
    from mcpc.cli.app import COMMANDS, GROUPS

    names = [command.__name__.replace("_", "-") for command in COMMANDS] + [str(group.info.name) for group in GROUPS]
    shown = mcpc("--help").stdout
    for name in names:
        assert f" {name} " in shown
        result = mcpc(name, "--help")
        assert result.returncode == 0, name
        assert "Usage: mcpc" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("inspct", "x"), "Did you mean 'inspect'?"),
        (("inspect", "x", "--jsn"), "--jsn"),
        (("inspect", "a", "b"), "b"),
        (("--log-format", "xml", "inspect", "x"), "--log-format"),
        (("targets", "lst"), "Did you mean 'list'?"),
    ],
)
def test_usage_errors_exit_2_with_a_hint(arguments: tuple[str, ...], words: str) -> None:
    result = mcpc(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert "hint: mcpc" in result.stderr


def test_a_usage_error_in_json() -> None:
    result = mcpc("inspect", "--json")
    assert result.returncode == 2
    assert json.loads(result.stdout)["error"] == "UsageError"


def test_no_arguments_show_the_help() -> None:
    result = mcpc()
    assert result.returncode == 2
    assert "Usage: mcpc" in result.stdout + result.stderr
    assert "error" not in result.stderr


@pytest.mark.parametrize("kind", ["templates", "recipes", "targets"])
def test_lists_show_what_ships(kind: str) -> None:
    items = json.loads(mcpc(kind, "list", "--json").stdout)[kind]
    assert items
    lines = mcpc(kind, "list").stdout.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [item["name"] for item in items]
    shown = json.loads(mcpc(kind, "show", items[0]["name"], "--json").stdout)
    assert shown["content"]["__meta__"]["name"] == items[0]["name"]


def test_an_unknown_name_suggests_the_nearest() -> None:
    result = mcpc("templates", "show", "lava")
    assert result.returncode == 3
    assert result.stderr.splitlines()[-1] == "hint: mcpc templates show llava"

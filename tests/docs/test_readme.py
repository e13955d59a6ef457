"""What the documents promise: commands run, make targets and files exist, tables match the code."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mcpc import errors
from mcpc.cli.app import COMMANDS, GROUPS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def console_lines(text: str) -> list[str]:
    """Return the commands of the console blocks, without their comments."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def by_hand() -> list[list[str]]:
    """Return the `mcpc` lines of the README, in order."""
    return [shlex.split(line)[1:] for line in console_lines(README) if line.startswith("mcpc ")]


def test_the_readme_has_commands() -> None:
    assert [arguments[0] for arguments in by_hand()] == [
        "convert",
        "quantize",
        "build-engine",
        "run",
        "verify",
        "inspect",
    ]


def test_the_table_of_commands_is_complete() -> None:
    table = README.split("## Commands")[1].split("## ")[0]
    names = {command.__name__.replace("_", "-") for command in COMMANDS} | {str(group.info.name) for group in GROUPS}
    listed = set(
        re.findall(
            r"`([a-z-]+)[ `]", "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| `"))
        )
    )
    assert listed == names


def test_every_make_target_that_is_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = {
        target for path in DOCUMENTS for target in re.findall(r"(?:^|`)make ([a-z]+)", path.read_text(), re.MULTILINE)
    }
    assert named >= {"setup", "check", "test", "demo", "assets"}
    assert named <= targets
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())  # type: ignore[index]
    assert phony == targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert "://" in target or (path.parent / target).exists(), target


def test_the_table_of_exit_codes_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| `?(\w*)`? *\|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    codes = {name: int(code) for code, name in rows if name}
    assert codes.pop("Interrupted") == int(errors.ExitCode.INTERRUPTED)
    assert codes == {kind.__name__: int(kind.exit_code) for kind in errors.McpcError.__subclasses__()}


def test_the_plain_pip_lines_are_those_of_make_setup() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lines = [line for line in console_lines(README) if ".venv/bin/pip install" in line]
    assert lines == [".venv/bin/pip install torch==2.13.0", '.venv/bin/pip install -e ".[export,rtx,dev]"']
    assert "TORCH := torch==2.13.0\n" in makefile
    assert '-e ".[export,rtx,dev]"' in makefile


def test_make_help_lists_the_targets() -> None:
    shown = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True).stdout
    for target in ("setup", "check", "test", "demo", "clean"):
        assert f"make {target} " in shown


@pytest.mark.slow
def test_the_commands_of_the_readme_work(tmp_path: Path) -> None:
    folder = tmp_path / "a clone"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    for arguments in by_hand():
        command = [sys.executable, "-m", "mcpc", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert result.returncode == 0, f"{shlex.join(arguments)}\n{result.stderr}"
        assert result.stdout.strip(), arguments
    assert sorted(path.name for path in (folder / "out").iterdir()) == ["llava", "llava-engines", "llava-int4"]

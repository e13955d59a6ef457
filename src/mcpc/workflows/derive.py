"""`mcpc templates derive`: draft a template for a checkpoint whose architecture none of the shipped ones fits."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from mcpc.checkpoint import Checkpoint
from mcpc.config.loader import parse_yaml
from mcpc.config.template import Template
from mcpc.core.progress import Progress
from mcpc.core.report import Report
from mcpc.errors import BadInputError, InternalError, UnsupportedError, UsageError
from mcpc.storage.directories import storage_error
from mcpc.templates.draft import Draft
from mcpc.templates.match import load_templates, select
from mcpc.templates.outside import template_problems


def derive_template(
    checkpoint_root: Path,
    output: Path | None = None,
    *,
    force: bool = False,
    strip_prefix: str = "",
    progress: Progress,
) -> Report:
    """Draft a template; its text is in the report, and in `output` when that is given.

    Args:
        checkpoint_root: Folder with config.json and safetensors files, of which only the headers are read.
        output: File to write.
        force: Replace an existing one.
        strip_prefix: Leading part of the tensors' names that the model does not know.
        progress: Shows the stages.

    Raises:
        UsageError: The output exists.
        UnsupportedError: The model is of no kind that mcpc packages.
        BadInputError: The config does not fit the tensors.
    """
    if output is not None:
        _check_file(output, force)
    progress.stage("reading", str(checkpoint_root))
    checkpoint = Checkpoint.open(checkpoint_root, strip_prefix)
    if not checkpoint.architecture:
        raise BadInputError(
            "config.json names no architecture", where=str(checkpoint.root), expected='"architectures": ["..."]'
        )
    shipped = _shipped(checkpoint)
    from mcpc.export.derive import derive  # torch takes seconds: only when the checkpoint is worth it

    draft = derive(checkpoint, progress)
    text = draft.render()
    _require_template(text)
    if output is not None:
        _write(output, text)
    return Report("templates derive", data=_facts(draft, text, shipped, output))


def _shipped(checkpoint: Checkpoint) -> str | None:
    """Return the shipped template that fits already, None when there is none."""
    try:
        return select(checkpoint, load_templates()).id
    except UnsupportedError:
        return None


def _require_template(text: str) -> None:
    """Refuse to hand out a draft that `--template` would refuse to read."""
    try:
        problems = list(template_problems(parse_yaml(text, Template, "the draft")))
    except BadInputError as error:
        raise InternalError(f"the draft is no template: {error}", problems=error.problems) from error
    if problems:
        raise InternalError(f"the draft is no template: {problems[0]}", problems=problems)


def _facts(draft: Draft, text: str, shipped: str | None, output: Path | None) -> dict[str, Any]:
    notes = [
        {"kind": note.kind, "where": ".".join(place), "text": note.text}
        for place, notes in draft.notes.items()
        for note in notes
    ]
    return {
        "kind": draft.content["kind"],
        "text": text,
        "output": None if output is None else str(output),
        "shipped": shipped,
        "check": draft.count("check"),
        "finish": draft.count("finish"),
        "notes": notes,
    }


def _check_file(output: Path, force: bool) -> None:
    if output.is_dir():
        raise UsageError("the output is a folder", where=str(output), hint="name a file: -o my-model.yaml")
    if (output.exists() or output.is_symlink()) and not force:
        raise UsageError("the output exists", where=str(output), hint="choose another -o, or pass --force")


def _write(output: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    staging: Path | None = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{output.name}.", suffix=".partial", dir=output.parent)
        staging = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staging.chmod(0o644)
        staging.replace(output)
    except OSError as error:
        raise storage_error(error, output) from error
    finally:
        if staging is not None:
            staging.unlink(missing_ok=True)

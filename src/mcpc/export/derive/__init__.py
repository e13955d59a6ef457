"""Draft a template for an architecture that none fits: what the model's class and config say, checked by running it."""

from __future__ import annotations

from collections.abc import Sequence

from mcpc.checkpoint import Checkpoint
from mcpc.core.progress import Progress
from mcpc.errors import McpcError
from mcpc.export.convert import Exporter
from mcpc.export.derive.dual import draft_dual
from mcpc.export.derive.kinds import kind_of
from mcpc.export.derive.language import draft_language
from mcpc.export.derive.probe import plan_of, reason
from mcpc.export.derive.seq2seq import draft_seq2seq
from mcpc.export.derive.sketch import Sketch
from mcpc.export.derive.unused import unused_patterns
from mcpc.templates.draft import Draft

__all__ = ["derive", "sketch"]


def derive(checkpoint: Checkpoint, progress: Progress) -> Draft:
    """Return the draft of a template for a checkpoint; no tensor is read.

    Raises:
        BadInputError: Config and tensors do not fit each other, so no template would.
        UnsupportedError: The model is of no kind that mcpc packages.
    """
    begun = sketch(checkpoint, progress)
    _trace(begun, progress)
    return begun.draft


def sketch(checkpoint: Checkpoint, progress: Progress) -> Sketch:
    """Return the draft before anything is traced: all of it but the weights that no component reads.

    Raises:
        BadInputError: Config and tensors do not fit each other, so no template would.
        UnsupportedError: The model is of no kind that mcpc packages.
    """
    progress.stage("building", checkpoint.architecture)
    exporter = Exporter(checkpoint)
    kind, doubt = kind_of(exporter.model, str(checkpoint.root))
    progress.stage("drafting", kind)
    begun = Sketch(exporter, kind)
    if doubt:
        begun.draft.check(("kind",), doubt)
    if kind == "dual-encoder":
        draft_dual(begun)
    elif kind.endswith("language"):
        draft_language(begun, "image" if kind == "vision-language" else "audio")
    else:
        draft_seq2seq(begun)
    return begun


def _trace(sketch: Sketch, progress: Progress) -> None:
    """Trace every component as `convert` will; note what fails, and which tensors none of them reads."""
    draft, exporter = sketch.draft, sketch.exporter
    try:
        plan = plan_of(draft.content, exporter.config)
    except McpcError as error:
        draft.finish(("components",), f"nothing was traced: {error}")
        return
    read: set[str] = set()
    whole = True
    for number, component in enumerate(plan.components):
        progress.stage("tracing", component.name)
        progress.advance(number, len(plan.components), component.name)
        place = ("components", component.name)
        if place in draft.notes:  # it did not run, so it does not trace
            whole = False
            continue
        try:
            traced = exporter.trace(component, plan)
        except Exception as error:  # noqa: BLE001 (torch raises many unrelated types)
            draft.finish(place, f"it does not trace: {reason(error)}")
            whole = False
            continue
        read |= {exporter.source[name] for name in traced.model.graph.initializers if name in exporter.source}
    if whole:
        _unused(sketch, read)
    else:
        draft.content["weights"] = {"unused": []}
        draft.finish(("weights",), "which tensors no component needs is known when every component traces")


def _unused(sketch: Sketch, read: set[str]) -> None:
    checkpoint, draft = sketch.checkpoint, sketch.draft
    stored = set(checkpoint.tensors)
    unused = stored - checkpoint.stored(read) - set(sketch.exporter.ignored)
    patterns = unused_patterns(sorted(stored), unused)
    if not patterns:
        return
    draft.content["weights"] = {"unused": [_entry(pattern) for pattern in patterns]}
    for number, pattern in enumerate(patterns):
        _explain(draft, number, pattern, sorted(unused))


def _entry(pattern: str) -> dict[str, str]:
    return {"pattern": pattern, "why": "no component reads it"}


def _explain(draft: Draft, number: int, pattern: str, unused: Sequence[str]) -> None:
    prefix = pattern.removesuffix("*")
    count = sum(name.startswith(prefix) for name in unused)
    what = f"{count} tensors" if count > 1 else "a tensor"
    draft.finish(("weights", "unused", str(number)), f"{what}; say why the answer does not depend on it")

"""Which files of a checkpoint folder hold its tensors, and where in them each tensor lies.

With an index, the index decides. transformers prefers a single `model.safetensors` that lies beside the shards,
whatever is in it, and fills a tensor that the index promises and no shard holds with random numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.storage.pointers import stand_in
from mcpc.storage.safetensors import Entry, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.msgpack", "tf_model*.h5")
_AGAIN = "download the checkpoint again"


@dataclass(frozen=True)
class TensorFiles:
    """The tensor files of a folder.

    Attributes:
        names: Relative to the folder, sorted.
        listed: The index's {tensor: file}, None without an index.
        notes: What a user should know, such as files that are ignored.
    """

    names: tuple[str, ...]
    listed: Mapping[str, str] | None
    notes: tuple[str, ...]


def find_tensor_files(root: Path) -> TensorFiles:
    """Return the files that hold the tensors of a checkpoint folder.

    Raises:
        BadInputError: There are none, or the index and the folder disagree; every finding is listed.
        UnsupportedError: The weights are pickled.
    """
    present = sorted(path.name for path in root.glob("*.safetensors"))
    if (root / INDEX).exists() or (root / INDEX).is_symlink():
        return _indexed(root, present)
    if SINGLE in present:
        extra = [name for name in present if name != SINGLE]
        notes = (f"ignored beside {SINGLE}: {', '.join(extra)}",) if extra else ()
        return TensorFiles((SINGLE,), None, notes)
    if len(present) == 1:
        return TensorFiles((present[0],), None, ())
    if present:
        raise BadInputError("several shards but no index", where=str(root), expected=INDEX, got=", ".join(present))
    raise _no_weights(root)


def _indexed(root: Path, present: list[str]) -> TensorFiles:
    path = root / INDEX
    listed = read_json(path, "").get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise BadInputError("the index has no weight_map", where=str(path))
    listed = {str(key): str(value) for key, value in listed.items()}
    names = tuple(sorted(set(listed.values())))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise BadInputError("the index names a file outside the folder", where=str(path), got=outside[0])
    missing = [
        Problem("the index names a shard that is missing", name)
        for name in names
        if not (root / name).is_file() and stand_in(root / name) is None
    ]
    if missing:
        raise BadInputError(
            f"missing shards: {', '.join(problem.where for problem in missing)}", where=str(root), problems=missing,
            hint=_AGAIN,
        )  # fmt: skip
    extra = [name for name in present if name not in names]
    notes = [f"ignored, because the index does not name it: {name}" for name in extra]
    return TensorFiles(names, listed, tuple(notes))


def _no_weights(root: Path) -> BadInputError | UnsupportedError:
    pickles = sorted({path.name for pattern in _PICKLES for path in root.glob(pattern)})
    if pickles:
        return UnsupportedError(
            "only pickled weights, which mcpc never loads", where=str(root), got=", ".join(pickles),
            hint="a pickle runs code when it is opened; load it on a machine that you can spare and save it as "
            "safetensors: model.save_pretrained(DIR)",
        )  # fmt: skip
    return BadInputError("no weights", where=str(root), expected=f"{SINGLE}, or shards with {INDEX}")


def read_tensors(root: Path, files: TensorFiles) -> tuple[dict[str, Entry], tuple[str, ...]]:
    """Return where each tensor lies, from the headers alone, and notes.

    Raises:
        BadInputError: A file is damaged, or index and shards disagree; every finding is listed.
    """
    tensors: dict[str, Entry] = {}
    elsewhere: dict[str, str] = {}
    problems: list[Problem] = []
    hint = _AGAIN
    for name in files.names:
        try:
            entries = read_header(root / name)
        except BadInputError as error:
            place = error.where.removeprefix(f"{root}/") or name
            problems.append(Problem(error.message, place, error.expected, error.got))
            hint = error.hint or hint
            continue
        for key, entry in entries.items():
            if files.listed is not None and files.listed.get(key, name) != name:
                elsewhere[key] = name  # the index gives this tensor to another shard
            elif key in tensors:
                problems.append(Problem("the tensor is in two shards", key, tensors[key].file.name, name))
            else:
                tensors[key] = entry
    if not problems and files.listed is not None:
        problems = [
            Problem("the index names a tensor that its shard lacks", key, file, elsewhere.get(key, "in no shard"))
            for key, file in sorted(files.listed.items())
            if key not in tensors
        ]
    if problems:
        raise BadInputError(f"damaged checkpoint: {problems[0]}", where=str(root), problems=problems, hint=hint)
    unlisted = sorted(set(tensors) - set(files.listed)) if files.listed is not None else []
    notes = (f"in a shard but not in the index: {', '.join(unlisted)}",) if unlisted else ()
    return tensors, notes


def read_json(path: Path, hint: str) -> dict[str, Any]:
    """Return a JSON object from a file.

    Raises:
        BadInputError: The file is missing, stands for another one, or is not a JSON object.
    """
    if (problem := stand_in(path)) is not None:
        raise BadInputError(problem.message, str(path), problem.expected, problem.got, "git lfs pull, or " + _AGAIN)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInputError(f"{path.name} is missing", where=str(path.parent), hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise BadInputError("not valid JSON", where=str(path), got=str(error)) from None
    if not isinstance(value, dict):
        raise BadInputError("not a JSON object", where=str(path), got=type(value).__name__)
    return value

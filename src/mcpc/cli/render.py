"""Small pieces that the human views of several commands share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.text import Text
from rich.tree import Tree

_UNITS = ("B", "kB", "MB", "GB", "TB")


def human_bytes(count: float) -> str:
    """Return bytes with a decimal unit, three digits: `8.56 MB`."""
    size = float(count)
    for unit in _UNITS:
        if abs(size) < 999.5 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} B" if unit == "B" else f"{size:.3g} {unit}"


def tensor_text(tensor: Mapping[str, Any]) -> str:
    """Return `name dtype[a, b]` of a tensor given as name, dtype and shape."""
    shape = tensor.get("shape")
    dims = "[?]" if shape is None else "[" + ", ".join(str(dim) for dim in shape) + "]"
    return f"{tensor['name']}  {tensor['dtype']}{dims}"


def branch(tree: Tree, label: str, value: object = "") -> Tree:
    """Add `label: value` to a tree; both are plain text, never markup."""
    text = Text(label, style="bold")
    shown = str(value)
    if shown:
        text.append(f"  {shown}", style="not bold")
    return tree.add(text)


def leaves(tree: Tree, lines: Iterable[str]) -> None:
    """Add plain lines to a tree."""
    for line in lines:
        tree.add(Text(line))


def shortened(items: Sequence[str], limit: int) -> list[str]:
    """Return at most `limit` items and, when some are left out, a last line that counts them."""
    rest = len(items) - limit
    return list(items) if rest <= 0 else [*items[:limit], f"... {rest} more; --json lists all"]

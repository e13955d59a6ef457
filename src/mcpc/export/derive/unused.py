"""Patterns over the tensors that no component of a template reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator


def unused_patterns(names: Collection[str], unused: Collection[str]) -> list[str]:
    """Return the fewest patterns that match the unused names and no other, each a whole module where it can be.

    >>> unused_patterns(["a.x.w", "a.x.b", "a.y.w", "c"], ["a.x.w", "a.x.b", "c"])
    ['a.x.*', 'c']
    """
    left, missing = set(unused), []
    for name in sorted(unused):
        if name not in left:
            continue
        prefix = next((prefix for prefix in _modules(name) if _whole(prefix, names, unused)), None)
        missing.append(name if prefix is None else f"{prefix}.*")
        left -= {name} if prefix is None else {item for item in left if item.startswith(f"{prefix}.")}
    return missing


def _modules(name: str) -> Iterator[str]:
    """Yield the modules that hold a tensor, the outermost first."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _whole(prefix: str, names: Collection[str], unused: Collection[str]) -> bool:
    return all(name in unused for name in names if name.startswith(f"{prefix}."))

"""Decide what happens to each weight, and why, before any work starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar, Protocol

from mcpc.core.tensors import nbytes
from mcpc.passes.quantize.weights import Weight


@dataclass(frozen=True)
class Int4Block:
    """Packed INT4 [K,N], a scale for each block of K and column; `padded`: N is odd and gets a zero column."""

    block: int
    padded: bool = False

    transform = "int4.block"

    def __str__(self) -> str:
        return f"int4 block {self.block}" + (", padded to an even width" if self.padded else "")

    def nbytes(self, depth: int, columns: int) -> int:
        """Return the bytes of the integers and scales of a [depth, columns] weight."""
        even = columns + columns % 2
        return nbytes("int4", (depth, even)) + nbytes("float32", (depth // self.block, even))


@dataclass(frozen=True)
class Int8Channel:
    """INT8 [K,N], a scale for each column."""

    transform = "int8.channel"

    def __str__(self) -> str:
        return "int8 per channel"

    def nbytes(self, depth: int, columns: int) -> int:
        """Return the bytes of the integers and scales of a [depth, columns] weight."""
        return depth * columns + nbytes("float32", (columns,))


@dataclass(frozen=True)
class Int8Rows:
    """INT8 [V,H], a scale for each row; a tied head reads the same bytes as [N,K].

    `equalized`: columns are divided by powers of two first, and multiplied after the lookup.
    """

    tied: bool = False
    equalized: bool = False

    transform = "int8.row"

    def __str__(self) -> str:
        return "int8 per row" + (" and column" if self.equalized else "") + (", table and head" if self.tied else "")

    def nbytes(self, depth: int, columns: int) -> int:
        """Return the bytes of the integers and scales of a table of `columns` rows of `depth`."""
        return depth * columns + nbytes("float32", (columns + (depth if self.equalized else 0),))


Form = Int4Block | Int8Channel | Int8Rows


@dataclass(frozen=True)
class Choice:
    """What a pass would do with a weight: a form, or a reason why not; neither when it is not the pass's kind."""

    form: Form | None = None
    reason: str = ""


class Chooser(Protocol):
    """What a plan asks of a pass."""

    id: ClassVar[str]

    def choose(self, weight: Weight) -> Choice:
        """Say what the pass would do with a weight that may be quantized."""
        ...


@dataclass(frozen=True, eq=False)
class Decision:
    """What happens to one weight.

    Attributes:
        weight: The weight.
        form: Its quantized form; None when it stays wide.
        pass_id: The pass that makes the form.
        reason: Why it stays wide, or why it did not get the form that an earlier step makes; "" otherwise.
    """

    weight: Weight
    form: Form | None
    pass_id: str
    reason: str

    @property
    def bytes_before(self) -> int:
        """Bytes of the weight in the input."""
        return nbytes(self.weight.stored_dtype, self.weight.shape)

    @property
    def bytes_after(self) -> int:
        """Bytes of the integers and scales, or of the float32 that a wide weight is kept in."""
        if self.form is None:
            return nbytes(self.weight.dtype, self.weight.shape)
        rows, columns = self.weight.shape
        transposed = isinstance(self.form, Int8Rows) or self.weight.sites[0].transposed
        return self.form.nbytes(columns, rows) if transposed else self.form.nbytes(rows, columns)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data."""
        return {
            "weight": self.weight.name,
            "source_name": self.weight.source_name,
            "shape": list(self.weight.shape),
            "form": str(self.form) if self.form else self.weight.dtype,
            "pass": self.pass_id,
            "reason": self.reason,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }


def make_plan(weights: Iterable[Weight], choosers: Sequence[Chooser]) -> tuple[Decision, ...]:
    """Return a decision for every weight: the first pass that takes it, and the reasons of those before."""
    return tuple(_decide(weight, choosers) for weight in weights)


def _decide(weight: Weight, choosers: Sequence[Chooser]) -> Decision:
    if weight.unfit:
        return Decision(weight, None, "", weight.unfit)
    reasons: list[str] = []
    for chooser in choosers:
        choice = chooser.choose(weight)
        if choice.reason and choice.reason not in reasons:
            reasons.append(choice.reason)
        if choice.form is not None:
            return Decision(weight, choice.form, chooser.id, "; ".join(reasons))
    return Decision(weight, None, "", "; ".join(reasons) or "no step of the recipe takes such a weight")


def matches(weight: Weight, patterns: Iterable[str]) -> str:
    """Return the first pattern that matches the weight's name, its `component/name` or its name in the checkpoint."""
    names = {weight.name, weight.source_name}
    names.update(f"{site.component}/{site.value.name}" for site in weight.sites)
    names.update(str(site.value.name) for site in weight.sites)
    return next((pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)), "")

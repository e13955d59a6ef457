"""What the quantizing passes have in common: they choose for a plan, and carry out their share of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

from mcpc.core.passes import Numerics, Pass, PassResult, Skip
from mcpc.core.runner import Array
from mcpc.errors import InternalError
from mcpc.passes.quantize.editor import Editor, graph_of
from mcpc.passes.quantize.plan import Choice, Decision, Form, make_plan
from mcpc.passes.quantize.streams import StreamedTensor
from mcpc.passes.quantize.weights import Site, Weight, survey

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class Pieces:
    """A tensor that will be made piece by piece."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    make: Callable[[], Iterator[Array]]


def register_pair(
    editor: Editor, site: Site, form: Form, key: Hashable, integers: Pieces, scales: Pieces
) -> tuple[ir.Value, ir.Value]:
    """Register the integers and scales of a quantized weight in the graph of a site.

    Args:
        editor: Edits the site's model.
        site: The use of the weight.
        form: Its quantized form.
        key: Equal for equal bytes: uses of one weight in one form share their bytes.
        integers: The quantized values.
        scales: Their scales.
    """
    name = str(site.value.name)
    bits = f"{name}.int{integers.dtype.bitwidth}"
    made = []
    for label, what, pieces in (("", "q", integers), (".scale", "s", scales)):
        tensor = StreamedTensor(
            pieces.make, pieces.dtype, pieces.shape, editor.name(bits + label), (key, str(form), what)
        )
        made.append(editor.initializer(graph_of(site.node), tensor, name, form.transform + label))
    return made[0], made[1]


class QuantizePass(Pass[OptionsT]):
    """Replaces the uses of weights by uses of their quantized form.

    `PassResult.details["made"]` maps each new initializer to (initializer it was made from, transform).
    """

    numerics = Numerics.LOSSY

    def __init__(self, config: OptionsT, plan: Sequence[Decision] | None = None, component: str = "") -> None:
        """Make a pass over one component.

        Args:
            config: The options of the recipe step.
            plan: The plan of the whole package; None plans for the model alone.
            component: The component of the plan that the model is.
        """
        super().__init__(config)
        self._plan = plan
        self._component = component

    @abstractmethod
    def choose(self, weight: Weight) -> Choice:
        """Say what the pass would do with a weight that may be quantized."""

    @abstractmethod
    def replace(self, editor: Editor, site: Site, weight: Weight, form: Form) -> None:
        """Replace one use of a weight."""

    def rewrite(self, model: ir.Model) -> PassResult:
        """Replace every use that the plan gives to this pass."""
        plan = make_plan(survey({self._component: model}), [self]) if self._plan is None else self._plan
        editor = Editor(model)
        skips = []
        for decision in plan:
            sites = [site for site in decision.weight.sites if site.component == self._component]
            if decision.form is not None and decision.pass_id == self.id:
                for site in sites:
                    self.replace(editor, site, decision.weight, decision.form)
                for value in {id(site.value): site.value for site in sites}.values():
                    editor.drop_unused(value)
            elif sites and self._plan is None:
                skips.append(Skip(decision.weight.name, decision.reason))
        return PassResult(bool(editor.made), tuple(skips), {"made": dict(editor.made)})

    def ensures(self, model: ir.Model, result: PassResult) -> None:
        """Check that every new initializer is used."""
        for graph in model.graphs():
            for name, value in graph.initializers.items():
                if name in result.details["made"] and not value.uses():
                    raise InternalError("a quantized initializer is not used", where=f"{self.id}: {name}")

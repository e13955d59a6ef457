"""The rewrites that a template names, on every traced graph of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.made import Made
from mcpc.core.pipeline import Pipeline
from mcpc.passes.registry import REWRITES
from mcpc.passes.rewrite.batch_norm import fold_weights


@dataclass(frozen=True)
class Rewritten:
    """What the rewrites did.

    Attributes:
        made: Initializers that are new -> how their tensors are made.
        facts: For the report: component, pass, nodes before and after, and what was left alone.
    """

    made: Mapping[str, Made]
    facts: Sequence[Mapping[str, Any]]


def rewrite(
    graphs: Mapping[str, ir.Model], names: Sequence[str], checkpoint: Checkpoint, source: Mapping[str, str]
) -> Rewritten:
    """Run passes on graphs whose weights are not bound yet; the graphs change in place.

    Args:
        graphs: Component -> its graph.
        names: Of the passes, in order, as a template gives them.
        checkpoint: Where the tensors lie.
        source: Parameter -> tensor of the checkpoint, or one that is made of others.
    """
    made: dict[str, Made] = {}
    facts: list[Mapping[str, Any]] = []
    pipeline = Pipeline([REWRITES[name](None) for name in names])
    for component, model in graphs.items():
        for name, result in zip(names, pipeline.run(model), strict=True):
            folds = result.details.get("folds", ())
            for fold in folds:
                made |= fold_weights(fold, checkpoint, source)
            facts.append(
                {
                    "component": component,
                    "rewrite": name,
                    "nodes_before": result.details["nodes_before"],
                    "nodes_after": result.details["nodes_after"],
                    "skipped": [{"where": skip.where, "reason": skip.reason} for skip in result.skips],
                }
            )
    return Rewritten(made, facts)

"""Fold a BatchNormalization into the convolution before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.made import Made, Part
from mcpc.core.passes import Numerics, Pass, PassResult, Skip
from mcpc.core.runner import Array
from mcpc.graph.hide import is_unbound, unbound
from mcpc.passes.rewrite.edit import feed, remove

_TRANSFORM = "fold batch norm"


@dataclass(frozen=True)
class Fold:
    """What becomes of one convolution; parameters by the names of their initializers.

    Attributes:
        weight: Of the convolution, [out, in / groups, ...].
        bias: Of the convolution, None without one.
        norm: Scale, bias, mean and variance of the normalization, [out] each.
        epsilon: Added to the variance.
        new_weight: Initializer of the folded weight.
        new_bias: Initializer of the folded bias.
    """

    weight: str
    bias: str | None
    norm: tuple[str, str, str, str]
    epsilon: float
    new_weight: str
    new_bias: str


class FoldBatchNorm(Pass[None]):
    """Let a convolution do what the normalization after it does.

    Before::

        a = Conv (x, W, b)
        y = BatchNormalization <epsilon = e> (a, scale, shift, mean, variance)

    After::

        y = Conv (x, W * f, (b - mean) * f + shift)        f = scale / sqrt(variance + e), for each output channel

    An activation after it then follows a convolution, which runtimes fuse. The new weights are not computed here: the
    details hold a `Fold` for each, and `fold_weights` says how they are made.

    Declines when the first result is used elsewhere, when the normalization is in training mode, and when a weight is
    no stored parameter, or is one that something else reads as well.

    Source: ONNX BatchNormalization-15, inference mode.
    """

    id = "rewrite.fold-batch-norm"
    version = 1
    numerics = Numerics.REASSOCIATED

    def rewrite(self, model: ir.Model) -> PassResult:
        """Fold every BatchNormalization that can be."""
        before = sum(1 for _ in model.graph)
        folds: list[Fold] = []
        skips: list[Skip] = []
        for node in list(model.graph):
            if node.op_type != "BatchNormalization" or node.domain:
                continue
            source = node.inputs[0]
            conv = None if source is None else source.producer()
            reason = _obstacle(conv, node)
            if reason is not None or conv is None:
                skips.append(Skip(str(node.name), reason or "no convolution before it"))
                continue
            folds.append(_fold(model.graph, conv, node))
        after = sum(1 for _ in model.graph)
        details = {"nodes_before": before, "nodes_after": after, "folds": tuple(folds)}
        return PassResult(bool(folds), tuple(skips), details)


def _obstacle(conv: ir.Node | None, norm: ir.Node) -> str | None:
    """Return why a normalization cannot be folded, None when it can."""
    if conv is None or conv.op_type != "Conv" or conv.domain:
        return "no convolution before it"
    if "training_mode" in norm.attributes and norm.attributes["training_mode"].as_int():
        return "it is in training mode"
    if any(output.uses() or output.is_graph_output() for output in norm.outputs[1:]):
        return "its statistics are read"
    if len(conv.outputs[0].uses()) > 1 or conv.outputs[0].is_graph_output():
        return "the convolution's result is used elsewhere too"
    if norm.outputs[0].is_graph_output():
        return "the result is an output of the graph"
    for value in (*conv.inputs[1:], *norm.inputs[1:]):
        if value is not None and not (value.is_initializer() and is_unbound(value)):
            return "a weight is no stored parameter"
    return None


def _fold(graph: ir.Graph, conv: ir.Node, norm: ir.Node) -> Fold:
    """Give a convolution new weights, and take the normalization out."""
    weight, bias = conv.inputs[1], conv.inputs[2] if len(conv.inputs) > 2 else None
    names = [str(value.name) for value in norm.inputs[1:] if value is not None]
    if weight is None or weight.shape is None or weight.dtype is None or len(names) != 4:
        raise ValueError(f"{norm.name}: a weight is missing")
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    kind = ir.TensorType(weight.dtype)
    new_weight = ir.Value(name=f"{weight.name}.folded", type=kind, shape=weight.shape)
    new_bias = ir.Value(name=f"{weight.name}.folded.bias", type=kind, shape=ir.Shape(weight.shape[:1]))
    for value in (new_weight, new_bias):
        value.const_value = unbound(value)
        graph.register_initializer(value)
    inputs = [conv.inputs[0], new_weight, new_bias]
    folded = ir.Node("", "Conv", inputs, list(conv.attributes.values()), name=f"{conv.name}.folded")
    folded.metadata_props.update(norm.metadata_props)
    folded.outputs[0].name, folded.outputs[0].type = f"{norm.outputs[0].name}.folded", norm.outputs[0].type
    folded.outputs[0].shape = norm.outputs[0].shape
    graph.insert_before(norm, folded)
    feed(graph, norm, folded.outputs[0])
    remove(graph, conv)
    return Fold(
        str(weight.name), None if bias is None else str(bias.name), (names[0], names[1], names[2], names[3]), epsilon,
        str(new_weight.name), str(new_bias.name),
    )  # fmt: skip


def fold_weights(fold: Fold, checkpoint: Checkpoint, source: Mapping[str, str]) -> dict[str, Made]:
    """Return {initializer: how its tensor is made}: two, in float32, since 16 bits would round what was exact.

    Args:
        fold: What the pass did.
        checkpoint: Where the tensors lie.
        source: Parameter -> tensor of the checkpoint, or one that is made of others.
    """
    read = _reader(checkpoint, source)
    shape = checkpoint.shape_of(source[fold.weight])

    def factor() -> Array:
        scale, _, _, variance = (read(name) for name in fold.norm)
        result: Array = scale / np.sqrt(variance + fold.epsilon)
        return result

    def weight() -> Array:
        columns = factor().reshape(-1, *(1,) * (len(shape) - 1))
        return (read(fold.weight) * columns).astype(np.float32)

    def bias() -> Array:
        _, shift, mean, _ = (read(name) for name in fold.norm)
        start = np.zeros(shape[0]) if fold.bias is None else read(fold.bias)
        return ((start - mean) * factor() + shift).astype(np.float32)

    names = [fold.weight, *fold.norm] + ([fold.bias] if fold.bias else [])
    sources = tuple(sorted(checkpoint.stored(source[name] for name in names)))
    origin = " + ".join(source[name] for name in names)
    return {
        fold.new_weight: Made(fold.new_weight, origin, _TRANSFORM, sources, "float32", Part(shape, weight)),
        fold.new_bias: Made(fold.new_bias, origin, _TRANSFORM, sources, "float32", Part(shape[:1], bias)),
    }


def _reader(checkpoint: Checkpoint, source: Mapping[str, str]) -> Callable[[str], Array]:
    """Return how a parameter is read, in float64."""

    def read(name: str) -> Array:
        key = source[name]
        flat = np.concatenate([piece.astype(np.float64) for piece in checkpoint.pieces(key)])
        return flat.reshape(checkpoint.shape_of(key))

    return read

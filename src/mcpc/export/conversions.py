"""How a tensor that no file holds is made of those that a checkpoint has, by transformers' own conversion mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import transformers
from transformers import core_model_loading as loading
from transformers.core_model_loading import ConversionOps, WeightConverter

from mcpc.checkpoint import Checkpoint
from mcpc.checkpoint.made import Made, Part, Stack, Value, concatenate, cut, interleave, permute_heads, transpose
from mcpc.errors import BadInputError, Problem, UnsupportedError
from mcpc.storage.safetensors import Entry

#: Values by the pattern that their names have: several where the pattern holds a number.
Values = dict[str, list[Value]]


class Conversion:
    """One group of tensors that becomes one or several parameters.

    Args:
        converter: What transformers does with them.
        target: The first parameter that they become.
    """

    def __init__(self, converter: WeightConverter, target: str) -> None:
        self._converter = converter
        self._target = target
        self.keys: dict[str, list[str]] = {}

    def add(self, pattern: str, key: str) -> None:
        """Add a tensor of the checkpoint under the pattern that its name has."""
        self.keys.setdefault(pattern, []).append(key)

    @property
    def targets(self) -> list[str]:
        """Return the parameters that they become."""
        first, *_ = self._converter.target_patterns
        return [self._target.replace(first, pattern, 1) for pattern in self._converter.target_patterns]

    def missing(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the parts that the checkpoint lacks, such as one expert of a layer, by the names they would have.

        Args:
            state: The model's parameters, all targets among them.
        """
        if any(type(operation).__name__ not in _OPERATIONS for operation in self._converter.operations):
            return []  # which parts it needs is not known: it is refused when they are made
        absent = [pattern for pattern in self._converter.source_patterns if pattern not in self.keys]
        if not any(isinstance(operation, _STACKS) for operation in self._converter.operations):
            return absent
        count = sum(state[name].shape[0] for name in self.targets)
        expected = {name for keys in self.keys.values() for name in _numbered(keys[0], count)}
        return absent + sorted(expected.difference(*self.keys.values()), key=loading.dot_natural_key)

    def made(
        self, config: transformers.PretrainedConfig, state: Mapping[str, torch.Tensor], checkpoint: Checkpoint
    ) -> list[Made]:
        """Return the parameters.

        Args:
            config: The model's config.
            state: Its parameters, all targets among them.
            checkpoint: Where the tensors lie.

        Raises:
            UnsupportedError: An operation that is not known here, or a tensor that cannot take part in one.
            BadInputError: Shapes or dtypes do not fit together.
        """
        names = [key for keys in self._ordered().values() for key in keys]
        dtypes = {checkpoint.dtype_of(name) for name in names}
        if len(dtypes) > 1 or any(name in checkpoint.packed for name in names):
            raise UnsupportedError(
                "tensors that become one parameter have different dtypes, or four bits", where=str(checkpoint.root),
                problems=[Problem(f"part of {self._target}", name, got=checkpoint.dtype_of(name)) for name in names],
            )  # fmt: skip
        values: Values = {
            pattern: [_leaf(checkpoint, key) for key in keys] for pattern, keys in self._ordered().items()
        }
        steps = []
        context = _Context(self._converter, config, tuple(state[self._target].shape))
        for operation in self._converter.operations:
            values, step = self._apply(operation, values, context, checkpoint)
            steps.append(step)
        origin = " + ".join(_with_star(keys) for keys in self._ordered().values())
        transform = ", ".join(steps)
        found = []
        for number, (name, results) in enumerate(zip(self.targets, values.values(), strict=True)):
            which = f" [{number + 1}/{len(values)}]" if len(values) > 1 else ""
            found.append(Made(name, origin, transform + which, tuple(names), dtypes.copy().pop(), results[0]))
        return found

    def _ordered(self) -> dict[str, list[str]]:
        """Return the tensors in the order of the converter's patterns; numbered ones in the order of their numbers."""
        known = [pattern for pattern in self._converter.source_patterns if pattern in self.keys]
        return {pattern: sorted(self.keys[pattern], key=loading.dot_natural_key) for pattern in known}

    def _apply(
        self, operation: ConversionOps, values: Values, context: _Context, checkpoint: Checkpoint
    ) -> tuple[Values, str]:
        parts = [key for keys in self.keys.values() for key in keys]
        apply = _OPERATIONS.get(type(operation).__name__)
        if apply is None:
            raise UnsupportedError(
                f"the checkpoint's layout needs an operation that mcpc does not do: {type(operation).__name__}",
                where=str(checkpoint.root),
                problems=[Problem("needs a conversion", key) for key in parts],
            )
        try:
            return apply(operation, values, context)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"the checkpoint's layout needs what mcpc does not do: {error}", where=str(checkpoint.root),
                problems=[Problem(f"part of {self._target}", key) for key in parts],
            ) from None  # fmt: skip
        except (ValueError, IndexError) as error:
            raise BadInputError(
                "tensors do not fit together", where=str(checkpoint.root), got=str(error),
                problems=[
                    Problem(f"part of {self._target}", key, got=str(list(checkpoint.shape_of(key)))) for key in parts
                ],
            ) from None  # fmt: skip


class _Context:
    """What an operation may need to know beside its values."""

    def __init__(
        self, converter: WeightConverter, config: transformers.PretrainedConfig, shape: tuple[int, ...]
    ) -> None:
        self.sources: Sequence[str] = converter.source_patterns
        self.targets: Sequence[str] = converter.target_patterns
        self.config = config
        self.shape = shape

    def renamed(self, values: Mapping[str, Value]) -> Values:
        """Return values under the target's pattern where only one is left, else under their own."""
        if len(values) == 1 and len(self.targets) == 1:
            return {self.targets[0]: [*values.values()]}
        return {pattern: [value] for pattern, value in values.items()}


def _merge(operation: loading.MergeModulelist, values: Values, context: _Context) -> tuple[Values, str]:
    _only_first_axis(operation.dim)
    return context.renamed({pattern: _stack(pattern, parts) for pattern, parts in values.items()}), "stack(0)"


def _share(
    operation: loading.ErnieFuseAndSplitTextVisionExperts, values: Values, context: _Context
) -> tuple[Values, str]:
    """Stack the first experts for the first target, the next for the second."""
    _only_first_axis(operation.stack_dim)
    done: Values = {}
    for number, target in enumerate(context.targets):
        stacks: list[Value] = []
        for pattern, parts in values.items():
            size = -(-len(parts) // len(context.targets))
            stacks.append(_stack(pattern, parts[number * size : (number + 1) * size]))
        done[target] = [stacks[0] if len(stacks) == 1 else concatenate(stacks, operation.concat_dim)]
    joined = f", concatenate({operation.concat_dim})" if len(values) > 1 else ""
    return done, f"share, stack(0){joined}"


def _stack(pattern: str, parts: Sequence[Value]) -> Stack:
    if len({part.shape for part in parts}) != 1:
        raise ValueError(f"different shapes under {pattern}")
    return Stack(tuple(parts))


def _only_first_axis(axis: int) -> None:
    if axis != 0:
        raise NotImplementedError(f"a stack along axis {axis}")


def _concatenate(operation: loading.Concatenate, values: Values, context: _Context) -> tuple[Values, str]:
    joined = concatenate([part for parts in values.values() for part in parts], operation.dim)
    return {context.targets[0]: [joined]}, f"concatenate({operation.dim})"


def _chunk(operation: loading.Chunk, values: Values, context: _Context) -> tuple[Values, str]:
    if operation.num_shards_attribute is not None:
        raise NotImplementedError(f"a number of parts that {operation.num_shards_attribute} gives")
    (value,) = _only(values)
    count = len(context.targets)
    parts = {target: [cut(value, operation.dim, number, count)] for number, target in enumerate(context.targets)}
    return parts, f"chunk({operation.dim})"


def _transpose(operation: loading.Transpose, values: Values, context: _Context) -> tuple[Values, str]:
    (value,) = _only(values)
    first, second = (axis % len(value.shape) for axis in (operation.dim0, operation.dim1))
    if operation.check_dims and value.shape == context.shape:
        return context.renamed({context.sources[0]: value}), "none"
    return context.renamed({context.sources[0]: transpose(value, first, second)}), f"transpose({first},{second})"


def _interleave(operation: loading.Interleave, values: Values, context: _Context) -> tuple[Values, str]:
    (value,) = _only(values)
    word = "alternate" if operation.inverse else "separate"
    done = interleave(value, operation.dim, operation.inverse)
    return {context.targets[0]: [done]}, f"{word}({operation.dim})"


def _permute(operation: loading.PermuteForRope, values: Values, context: _Context) -> tuple[Values, str]:
    config = context.config
    if operation.subconfig_key is not None:
        config = getattr(config, operation.subconfig_key, config)
    heads, names = int(getattr(config, "num_attention_heads", 1)), operation.permute_layer_names
    done = {
        pattern: permute_heads(parts[0], heads, operation.inverse)
        if names is None or any(name in pattern for name in names)
        else parts[0]
        for pattern, parts in values.items()
    }
    return context.renamed(done), f"permute_heads({heads})"


def _only(values: Values) -> list[Value]:
    found = [part for parts in values.values() for part in parts]
    if len(found) != 1:
        raise ValueError(f"{len(found)} tensors where one is expected")
    return found


#: Operations that make one tensor of numbered ones.
_STACKS = (loading.MergeModulelist, loading.ErnieFuseAndSplitTextVisionExperts)
_OPERATIONS: Mapping[str, Callable[..., tuple[Values, str]]] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute,
    "ErnieFuseAndSplitTextVisionExperts": _share,
}


def _leaf(checkpoint: Checkpoint, key: str) -> Value:
    entry: Entry = checkpoint.tensors[key]
    if key in checkpoint.scales:
        scale = checkpoint.scales[key]
        return Part(entry.shape, lambda: np.concatenate(list(scale.dequantized(entry))))
    return Part(entry.shape, entry.read)


def _numbered(name: str, count: int) -> list[str]:
    """Return a name with each number below `count` in place of its last one."""
    words = name.split(".")
    place = max((number for number, word in enumerate(words) if word.isdigit()), default=None)
    if place is None:
        return [name]
    return [".".join([*words[:place], str(number), *words[place + 1 :]]) for number in range(count)]


def _with_star(keys: Sequence[str]) -> str:
    """Return names that differ in numbers as one."""
    columns = zip(*(key.split(".") for key in keys), strict=True)
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)

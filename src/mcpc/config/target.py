"""Types of a target: data that says what a chip and its runtime take. Unknown keys are refused.

A target file names the chips and refers to a runtime file, which holds the tables. A backend checks a graph against
both before anything is built, so that every problem is found at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mcpc.config.loader import load_yaml
from mcpc.errors import UnsupportedError
from mcpc.resources import templates_dir

Precision = Literal["keep", "float32", "float16", "bfloat16"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]


class Strict(BaseModel):
    """Base of every part of the two files."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Meta(Strict):
    """Identity of the file."""

    kind: Literal["target", "runtime"]
    schema_version: Literal["1.0"]
    name: Name
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]


class OpsetRange(Strict):
    """Versions of the standard ONNX operator set that the runtime's parser reads as they are meant."""

    min: int
    max: int


class OpGroup(Strict):
    """Ops whose tensors may have these dtypes."""

    dtypes: tuple[str, ...]
    ops: tuple[str, ...]


class Weights(Strict):
    """What the runtime takes as a packed weight in front of a `DequantizeLinear`."""

    dtypes: tuple[str, ...]
    block_sizes: tuple[int, ...] = Field(description="INT4 elements that share a scale.")
    zero_points: Literal["zero"] = Field(description="`zero`: symmetric quantization only.")
    columns_multiple: int = Field(description="Columns of a packed weight; others are widened at every run.")


class SizeRange(Strict):
    """Smallest, typical and largest size of one named dimension."""

    min: Annotated[int, Field(ge=0)]
    opt: Annotated[int, Field(ge=0)]
    max: Annotated[int, Field(ge=0)]

    @model_validator(mode="after")
    def _ordered(self) -> SizeRange:
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"sizes must not fall: {self.min}, {self.opt}, {self.max}")
        return self


class Runtime(Strict):
    """What a runtime's parser and builder take: `templates/runtimes/*.yaml`."""

    meta: Meta = Field(alias="__meta__")
    backend: Literal["tensorrt-rtx"]
    opset: OpsetRange
    default_precision: Mapping[str, Precision] = Field(
        description="Dtype of the source weights -> dtype of the engine."
    )
    io_dtypes: tuple[str, ...] = Field(description="Dtypes of graph inputs and outputs.")
    ops: tuple[OpGroup, ...]
    refused: Mapping[str, str] = Field(description="Op -> why the runtime refuses it.")
    weights: Weights
    dimensions: Mapping[str, SizeRange] = Field(description="Default sizes of the packages' named dimensions.")

    @model_validator(mode="after")
    def _each_op_once(self) -> Runtime:
        seen: set[str] = set()
        for op in (*(op for group in self.ops for op in group.ops), *self.refused):
            if op in seen:
                raise ValueError(f"the op {op} is listed twice")
            seen.add(op)
        return self

    @cached_property
    def op_dtypes(self) -> Mapping[str, frozenset[str]]:
        """Return {op: dtypes its tensors may have}."""
        return {op: frozenset(group.dtypes) for group in self.ops for op in group.ops}


class Target(Strict):
    """One or more chips and the runtime that serves them: `templates/targets/*.yaml`."""

    meta: Meta = Field(alias="__meta__")
    description: str
    runtime: Name = Field(description="Name of the runtime file.")
    compute_capabilities: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="As the runtime spells them: SM89."
    )

    @property
    def name(self) -> str:
        """Return the name that `--target` takes."""
        return self.meta.name


def target_names() -> list[str]:
    """Return the names of the shipped targets, sorted."""
    return sorted(path.stem for path in templates_dir("targets").glob("*.yaml"))


def load_target(name: str) -> Target:
    """Return a shipped target by name.

    Raises:
        UnsupportedError: There is no target of that name.
        BadInputError: Its file is malformed.
    """
    names = target_names()
    if name not in names:
        raise UnsupportedError(
            "unknown target", where=name, expected=", ".join(names), hint="pass one of these to --target"
        )
    return load_yaml(templates_dir("targets") / f"{name}.yaml", Target)


def load_runtime(name: str) -> Runtime:
    """Return a shipped runtime by name.

    Raises:
        BadInputError: There is none, or its file is malformed.
    """
    return load_yaml(templates_dir("runtimes") / f"{name}.yaml", Runtime)

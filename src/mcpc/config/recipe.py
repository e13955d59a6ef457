"""Types of a recipe file: which passes run, in which order, with which options."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Version = Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]


class Strict(BaseModel):
    """Unknown keys are an error, values are immutable, nothing is coerced."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EmbeddingInt8Options(Strict):
    """Options of `quantize.embedding-int8`."""

    minimum_elements: int = Field(default=65_536, ge=0, strict=True, description="A smaller table stays wide.")
    exclude: tuple[str, ...] = Field(default=(), description="Patterns of weight names that the pass leaves alone.")


class LinearInt4Options(Strict):
    """Options of `quantize.linear-int4`."""

    block: Literal[32, 64, 128] = Field(default=32, description="Weights along K that share a scale.")
    minimum_elements: int = Field(default=1_024, ge=0, strict=True, description="A smaller weight stays wide.")
    exclude: tuple[str, ...] = Field(default=(), description="Patterns of weight names that the pass leaves alone.")


class LinearInt8Options(Strict):
    """Options of `quantize.linear-int8`."""

    minimum_elements: int = Field(default=1_024, ge=0, strict=True, description="A smaller weight stays wide.")
    exclude: tuple[str, ...] = Field(default=(), description="Patterns of weight names that the pass leaves alone.")


class EmbeddingInt8Step(Strict):
    """One step of a recipe."""

    pass_id: Literal["quantize.embedding-int8"] = Field(alias="pass")
    version: Literal[1]
    options: EmbeddingInt8Options = EmbeddingInt8Options()


class LinearInt4Step(Strict):
    """One step of a recipe."""

    pass_id: Literal["quantize.linear-int4"] = Field(alias="pass")
    version: Literal[1]
    options: LinearInt4Options = LinearInt4Options()


class LinearInt8Step(Strict):
    """One step of a recipe."""

    pass_id: Literal["quantize.linear-int8"] = Field(alias="pass")
    version: Literal[1]
    options: LinearInt8Options = LinearInt8Options()


Step = Annotated[EmbeddingInt8Step | LinearInt4Step | LinearInt8Step, Field(discriminator="pass_id")]


class RecipeMeta(Strict):
    """What the file is."""

    kind: Literal["recipe"]
    schema_version: Literal["1.0"]
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")
    version: Version
    summary: str = ""


class Recipe(Strict):
    """A recipe file: each step takes what the steps before it left."""

    meta: RecipeMeta = Field(alias="__meta__")
    steps: tuple[Step, ...] = Field(min_length=1)

"""Types of a compile recipe: the whole chain from a checkpoint to engines and answers, in one file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

#: Name of the package that `convert` makes; a quantize step is named by its recipe, or by its `name`.
FLOAT = "float"
StageName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


class Strict(BaseModel):
    """Unknown keys are an error, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class CompileMeta(Strict):
    """What the file is."""

    kind: Literal["compile-recipe"]
    schema_version: Literal["1.0"]
    name: StageName


class AdapterSource(Strict):
    """A LoRA adapter that is merged into the weights."""

    path: str = Field(description="Folder of the adapter, relative to this file.")
    weight: float = 1.0


class ConvertStage(Strict):
    """Options of `mcpc convert`; the package is `float`."""

    dtype: Literal["keep", "float32", "float16", "bfloat16"] = "keep"
    verify: Literal["auto", "full", "layers", "sample", "none"] = "auto"
    template: str | None = Field(
        default=None, description="Path, relative to this file, of a template that does not ship with mcpc."
    )
    adapters: tuple[AdapterSource, ...] = Field(default=(), description="Merged in this order, as --adapter does.")


class QuantizeStage(Strict):
    """Options of one `mcpc quantize` of the float package."""

    recipe: str = Field(description="Name of a shipped recipe, or a path relative to this file.")
    name: StageName | None = Field(default=None, description="Name of the package; the recipe's name when left out.")
    block: Literal[32, 64, 128] | None = Field(default=None, description="Weights that share a scale, for INT4.")
    verify: Literal["full", "none"] = "full"

    @property
    def package(self) -> str:
        """Return the name of the package."""
        return self.name or self.recipe.rpartition("/")[2].removesuffix(".yaml")


class EngineStage(Strict):
    """Options of `mcpc build-engine` for each package and target."""

    packages: tuple[StageName, ...] = Field(default=(), description="Packages to build; the last one when left out.")
    targets: Annotated[tuple[str, ...], Field(min_length=1)]
    precision: Literal["keep", "float32", "float16", "bfloat16"] | None = Field(
        default=None, description="Float dtype of the engines; the target's choice when left out."
    )
    profiles: tuple[str, ...] = Field(default=(), description="As --profile: component.input=min,opt,max.")
    verify: Literal["lowered", "none"] = "lowered"


class Request(Strict):
    """One request that the compiled model answers at the end."""

    image: str | None = Field(default=None, description="Path relative to this file.")
    audio: str | None = Field(default=None, description="Path relative to this file.")
    prompt: str | None = None
    texts: tuple[str, ...] = Field(default=(), description="Dual encoders: the texts that are scored.")

    @model_validator(mode="after")
    def _asks_something(self) -> Request:
        if self.audio is None and self.image is None and self.prompt is None:
            raise ValueError("a request needs an image, an audio file or a prompt")
        return self


class CompileRecipe(Strict):
    """A compile recipe file. Paths are relative to the folder that holds it."""

    meta: CompileMeta = Field(alias="__meta__")
    checkpoint: str
    output: str | None = Field(default=None, description="Folder to write; `-o` overrides it.")
    convert: ConvertStage = ConvertStage()
    quantize: tuple[QuantizeStage, ...] = ()
    engine: EngineStage | None = None
    run: tuple[Request, ...] = ()

    @property
    def packages(self) -> tuple[str, ...]:
        """Return the names of the packages that the chain makes, in order."""
        return (FLOAT, *(stage.package for stage in self.quantize))

    @model_validator(mode="after")
    def _consistent(self) -> CompileRecipe:
        names = self.packages
        if len(set(names)) != len(names):
            raise ValueError(f"two packages have one name: {', '.join(names)}")
        unknown = sorted(set(self.engine.packages if self.engine else ()) - set(names))
        if unknown:
            raise ValueError(f"engine.packages names no package of this recipe: {', '.join(unknown)}")
        return self

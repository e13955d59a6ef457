"""Types of a model template: data that says which components a family has. Unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]


class Strict(BaseModel):
    """Base of every template part."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Meta(Strict):
    """Identity of the template."""

    kind: Literal["model-template"]
    schema_version: Literal["1.0"]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    version: Annotated[str, Field(pattern=r"^\d+\.\d+\.\d+$")]


class Match(Strict):
    """When a checkpoint belongs to the family: every line must hold."""

    architectures: tuple[str, ...]
    config: dict[str, tuple[Any, ...]] = Field(
        default_factory=dict, description="Dotted path in config.json -> allowed values."
    )


class TensorPlan(Strict):
    """A graph input or output. `float` becomes the package's float dtype."""

    dtype: Literal["float", "int64", "int32", "bool"]
    shape: tuple[str | int, ...] = Field(description="Sizes, names from `dimensions`, or sums such as past+sequence.")


class Call(Strict):
    """Which wrapper of `export/components.py` traces the component, and its options."""

    wrapper: str = Field(description="A name in the registry of export/wrappers.py.")
    method: str | None = Field(default=None, description="`features`: the method of the transformers model.")
    flatten: bool = Field(default=False, description="`features`: [items, rows, H] becomes [items * rows, H].")
    scale: Literal["exp(logit_scale)", "1 / temperature", "1"] = Field(
        default="exp(logit_scale)", description="`similarity`: multiplier of the cosine, from the model's parameters."
    )
    bias: Literal["logit_bias"] | None = Field(default=None, description="`similarity`: added to the scaled cosine.")


class Cache(Strict):
    """Key/value cache tensors `past.{i}.key`, `present.{i}.value`, and `cross.{i}.*` when `cross` is set."""

    kind: Literal["concat"]
    layers: str
    layout: tuple[str, ...]
    value: tuple[str, ...] | None = Field(default=None, description="Layout of values, where it is not that of keys.")
    types: str | None = Field(default=None, description="Dotted path of the list of the layers' types.")
    states: dict[str, dict[Literal["conv"], tuple[str, ...]]] = Field(
        default_factory=dict, description="Type of layer -> what it keeps in the place of keys and values."
    )
    cross: tuple[str, ...] | None = Field(default=None, description="Layout of the cross-attention cache.")


class ComponentPlan(Strict):
    """One ONNX graph of the package."""

    role: Literal["encoder", "embedding", "decoder", "head"]
    modality: Literal["image", "text", "audio", "video"] | None = None
    call: Call
    inputs: dict[Name, TensorPlan]
    outputs: dict[Name, TensorPlan]
    cache: Cache | None = None
    cross_outputs: bool = Field(default=False, description="The encoder also returns the cross-attention cache.")
    contract: str | None = None


class PlaceholderPlan(Strict):
    """The token that stands for one feature row."""

    token_id: str = Field(description="Dotted path in the config.")


class HostPlan(Strict):
    """A function of `processing/hosts.py` between processor and encoder."""

    name: Literal["any-resolution", "batched-tiles", "image-patches", "padded-patches"]
    settings: dict[str, str | int] = Field(description="Name -> dotted path in the config, or a number.")


class ModalityPlan(Strict):
    """Inputs and limits of one modality; limits are policy, so they stand here and not in code."""

    inputs: tuple[str, ...]
    mime_types: tuple[str, ...] = ()
    max_bytes: int | None = None
    max_pixels: int | None = None
    host: HostPlan | None = None
    batched: bool = Field(
        default=False, description="The model's forward takes the items of each prompt apart: [prompts, items, ...]."
    )
    merge: str | None = Field(
        default=None, description="Images of any size, as packed patches: patches along each side of one feature row."
    )
    sizes: dict[str, tuple[int, ...]] = Field(
        default_factory=dict,
        description="Sizes of the inputs' dynamic dimensions: the first is traced, the others are verified.",
    )


class BindingPlan(Strict):
    """Prompt length and format."""

    max_tokens: str
    truncation: Literal["refuse", "proportional"]
    prompt: str | None = Field(default=None, description="Used when the checkpoint brings no chat template.")
    pad_to: str | None = Field(default=None, description="Text encoders: dotted path of the fixed token length.")
    suffix: tuple[str, ...] = Field(default=(), description="Dotted paths of token ids appended after the text.")
    token_types: Literal["image", "prefix"] | None = Field(
        default=None,
        description="What `token_type_ids` mark: image rows by 1; or generated tokens by 1, the prompt by 0.",
    )
    first_position: int = Field(default=0, description="Position id of the first token.")


class Unused(Strict):
    """Checkpoint tensors that no component needs."""

    pattern: str
    why: str


class Weights(Strict):
    """What may stay unused."""

    unused: tuple[Unused, ...] = ()


class GenerationPlan(Strict):
    """Bounds of generation that no file of the checkpoint gives."""

    max_new_tokens: int = Field(description="Default of `mcpc run`.")
    start: tuple[str, ...] = Field(default=(), description="Dotted paths of the ids that a decoder starts from.")
    end: str | None = Field(default=None, description="Dotted path of the end-of-text id, where it has another name.")


#: The passes `rewrite.<name>`.
Rewrite = Literal["fold-batch-norm", "join-transposes", "join-reshapes", "join-squeezes"]


class Template(Strict):
    """A model template file."""

    meta: Meta = Field(alias="__meta__")
    kind: Literal["vision-language", "audio-language", "dual-encoder", "speech-seq2seq", "image-seq2seq"]
    match: Match
    dimensions: dict[str, str] = Field(description="Name -> expression over the config, such as config.a / config.b.")
    dynamic: tuple[str, ...]
    components: dict[Name, ComponentPlan]
    edges: tuple[tuple[str, str], ...] = ()
    placeholders: dict[str, PlaceholderPlan] = Field(default_factory=dict)
    modalities: dict[str, ModalityPlan]
    binding: BindingPlan | None = None
    generation: GenerationPlan | None = None
    weights: Weights = Weights()
    rewrites: tuple[Rewrite, ...] = Field(default=(), description="Rewrites of every traced graph, in this order.")

    @property
    def id(self) -> str:
        """Return `name@version`."""
        return f"{self.meta.name}@{self.meta.version}"

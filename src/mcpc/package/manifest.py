"""Types of `manifest.json`, ONNX-Multimodal 2.1.

Unknown keys are refused; `schemas/manifest.json` is made from these types.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mcpc.core.tensors import TensorSpec

SCHEMA_VERSION: Literal["2.1"] = "2.1"
Dim = int | str
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Base of every file type: unknown keys are an error, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Strict):
    """The checkpoint a package was made from."""

    identity: Digest = Field(description="Digest of config, headers and sizes; costs no tensor I/O.")
    digest: Digest | None = Field(
        default=None, description="Digest of the file contents; None when nothing read them (referenced, unverified)."
    )
    files: tuple[str, ...]
    dtype: str


class ModelInfo(Strict):
    """Which model this is."""

    architecture: str
    model_type: str
    template: str = Field(description="name@version of the template that planned it.")
    template_digest: Digest | None = Field(
        default=None, description="Of the package's template.yaml, for a template that does not ship with mcpc."
    )
    source: Source


class Tensor(Strict):
    """One graph input or output; dynamic dimensions are named, or a sum of names such as `past+sequence`."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def spec(self) -> TensorSpec:
        """Return the core value type."""
        return TensorSpec(self.name, self.dtype, self.shape)


class Initializer(Strict):
    """Where the bytes of one initializer come from.

    `transform` says how they were made from `source_name`: `none`, `cast`, `int4.block`, `int8.channel`, ...
    A quantized tensor's scales carry the same `source_name` and `transform: "<...>.scale"`.
    """

    source_name: str
    transform: str = "none"


class Precision(Strict):
    """Weight elements by dtype, and their bytes in the package."""

    weights: dict[str, int]
    bytes: int


class Component(Strict):
    """One ONNX graph of the package."""

    name: str
    role: Literal["encoder", "embedding", "decoder", "head", "other"]
    modality: Literal["image", "text", "audio", "video"] | None = None
    file: str
    contract: str | None = None
    functions: tuple[str, ...] = ()
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    precision: Precision
    weights: tuple[str, ...] = Field(default=(), description="Weight files that the graph points into.")
    initializers: dict[str, Initializer] = Field(default_factory=dict)


class Resample(Strict):
    """Resize of an image: exact size, or the shortest edge."""

    height: int | None = None
    width: int | None = None
    shortest_edge: int | None = None
    filter: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]


class ImagePreprocess(Strict):
    """From a decoded RGB image to `pixel_values`; the steps run in the order of the fields."""

    resize: Resample | None = None
    center_crop: tuple[int, int] | None = Field(default=None, description="height, width")
    rescale: float | None = Field(default=None, description="Multiplier of the uint8 values.")
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    layout: Literal["NCHW"] = "NCHW"


class AudioPreprocess(Strict):
    """From a mono waveform to log-mel features, as Whisper defines them."""

    kind: Literal["whisper-log-mel"]
    sampling_rate_hz: int
    n_fft: int
    hop_length: int
    mel_bins: int
    chunk_s: int
    padding_value: float
    dither: float


HostSettings = dict[str, int | str | tuple[tuple[int, int], ...] | None]


class Host(Strict):
    """What happens between the processor and the image encoder: a function of mcpc, with its settings."""

    name: Literal["any-resolution", "batched-tiles", "image-patches", "padded-patches"]
    settings: HostSettings


class Modality(Strict):
    """What one modality accepts and how it becomes graph inputs."""

    inputs: tuple[str, ...]
    mime_types: tuple[str, ...] = ()
    max_bytes: int | None = None
    max_pixels: int | None = None
    max_duration_s: float | None = None
    max_tokens: int | None = None
    vocabulary: int | None = Field(default=None, description="Rows of the embedding table; larger ids are refused.")
    tokenizer: str | None = None
    preprocess: ImagePreprocess | AudioPreprocess | None = None
    host: Host | None = Field(default=None, description="What the processor's output goes through before the encoder.")
    preprocess_refused: str | None = Field(default=None, description="Why the steps are not described; `run` refuses.")
    sizes: dict[str, tuple[int, ...]] = Field(
        default_factory=dict, description="Sizes of the inputs' dynamic dimensions that verification uses."
    )
    merge: int | None = Field(
        default=None, description="Images of any size, as packed patches: patches along each side of one feature row."
    )
    rows_per_item: int | None = Field(default=None, description="Feature rows of one item, measured from the graph.")
    ms_per_row: float | None = Field(default=None, description="Milliseconds of audio in one feature row.")


class Vocabulary(Strict):
    """The sizes that a token id has to fit in; they often differ, and each use is bound by its own."""

    tokenizer_size: int | None = Field(default=None, description="Largest id of the tokenizer, plus one.")
    embedding_rows: int | None = Field(default=None, description="Ids from here on are refused at run time.")
    head_rows: int | None = Field(default=None, description="Logits of one token.")


class Placeholder(Strict):
    """The token that stands for one feature row of a modality."""

    token: str
    token_id: int


class Truncation(Strict):
    """What happens to a prompt beyond `max_tokens`."""

    policy: Literal["refuse", "proportional"]
    keeps_placeholders_consistent: bool = True


class Binding(Strict):
    """How features enter the token stream, and the prompt format of the model."""

    placeholders: dict[str, Placeholder] = Field(default_factory=dict)
    max_tokens: int
    truncation: Truncation
    prompt: str | None = Field(default=None, description="Prompt format: `{image}` and `{text}` are replaced.")
    pad_token_id: int | None = Field(default=None, description="Fills up shorter texts of a batch.")
    pad_to: int | None = Field(default=None, description="Text encoders: fixed token length, or None.")
    suffix_token_ids: tuple[int, ...] = Field(default=(), description="Tokens appended after the text.")
    token_types: Literal["image", "prefix"] | None = Field(
        default=None,
        description="What `token_type_ids` mark: image rows by 1; or generated tokens by 1, the prompt by 0.",
    )
    first_position: int = Field(default=0, description="Position id of the first token.")


class Generation(Strict):
    """How the decoder is started, constrained and stopped."""

    decoder_start_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None = None
    suppress_token_ids: tuple[int, ...] = ()
    begin_suppress_token_ids: tuple[int, ...] = ()
    max_new_tokens: int


class KvCache(Strict):
    """Layout of the key/value cache of the decoder."""

    kind: Literal["concat"] = "concat"
    layers: int
    layout: tuple[str, ...]
    kv_heads: int
    head_dim: int
    dtype: str
    bytes_per_token: int
    cross: bool = Field(default=False, description="Cross-attention keys and values come from the encoder, once.")


class Step(Strict):
    """One thing that was done to the package."""

    command: str
    template: str | None = None
    passes: tuple[dict[str, Any], ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)


class Lineage(Strict):
    """Where the package comes from."""

    parent: Digest | None = None
    steps: tuple[Step, ...]


class VerificationRef(Strict):
    """How the numbers were checked."""

    checked: Literal["executed", "lowered", "none"]
    file: str = "verification.json"


class Unused(Strict):
    """Checkpoint tensors that no component uses, and why."""

    name: str
    why: str


class Manifest(Strict):
    """`manifest.json`."""

    schema_version: Literal["2.1"] = SCHEMA_VERSION
    kind: Literal["vision-language", "audio-language", "dual-encoder", "speech-seq2seq", "image-seq2seq", "onnx"] = (
        Field(description="Which chain of components answers a request.")
    )
    model: ModelInfo
    vision_encoder_ref: str | None = None
    opset: dict[str, int]
    components: tuple[Component, ...]
    edges: tuple[tuple[str, str], ...] = ()
    modalities: dict[str, Modality] = Field(default_factory=dict)
    vocabulary: Vocabulary | None = None
    binding: Binding | None = None
    generation: Generation | None = None
    kv_cache: KvCache | None = None
    unused: tuple[Unused, ...] = ()
    lineage: Lineage
    schema_hash: str
    verification: VerificationRef

    def component(self, name: str) -> Component:
        """Return the component of that name.

        Raises:
            KeyError: There is none.
        """
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)

    def by_role(self, role: str, modality: str | None = None) -> Component:
        """Return the first component of a role (and modality).

        Raises:
            KeyError: There is none.
        """
        for component in self.components:
            if component.role == role and modality in (None, component.modality):
                return component
        raise KeyError(role)

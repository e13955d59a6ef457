"""Draft a language model that reads rows of images or of sound between its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcpc.errors import UnsupportedError
from mcpc.export.derive.configs import Found
from mcpc.export.derive.kinds import method, parameters
from mcpc.export.derive.probe import Decoder, Shape, run_decoder
from mcpc.export.derive.sketch import Component, Sketch, tensor

_PLACEHOLDERS = {"image": ("image", "img", "vision", "media"), "audio": ("audio", "speech", "sound")}
#: Frames, or samples, that a clip of any length is traced at first and verified at.
_FRAMES, _SAMPLES = (67, 80, 111), (4009, 5000, 7001)


@dataclass(frozen=True)
class Variant:
    """One way to write an encoder.

    Attributes:
        component: As a template writes it.
        dynamic: Its dynamic dimensions.
        sizes: Of dynamic dimensions that are more than a small number.
        fixed: Dimensions that no other variant has.
    """

    component: Component
    dynamic: Sequence[str]
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Found] = field(default_factory=dict)


def first_that_runs(sketch: Sketch, variants: Sequence[Variant]) -> tuple[Variant, Sequence[Shape] | None, str]:
    """Return the first variant that runs and its outputs' shapes, else the first of all and what it said.

    The sizes that only this variant has become dimensions of the draft.
    """
    said = []
    for variant in variants:
        sizes = {name: given[0] for name, given in variant.sizes.items()}
        result = sketch.run(variant.component, variant.dynamic, sizes, variant.fixed)
        if not isinstance(result, str):
            break
        said.append(result)
    else:
        variant, result = variants[0], None
    for name, found in variant.fixed.items():
        sketch.dimension(name, found)
    return variant, result, said[0] if result is None else ""


def draft_language(sketch: Sketch, modality: str) -> None:
    """Write encoder, embedding and decoder; `modality` is `image` or `audio`."""
    name = "vision_encoder" if modality == "image" else "audio_encoder"
    features = f"{modality}_features"
    variants = list(_images(sketch) if modality == "image" else _sounds(sketch))
    chosen, _, said = first_that_runs(sketch, variants)
    language = _language(sketch)
    chosen.component["outputs"][features]["shape"][-1] = "hidden"
    sketch.draft.content["dynamic"] = [*chosen.dynamic, "batch", "sequence", "past"]
    sketch.place(name, chosen.component)
    if said:
        sketch.draft.finish(("components", name), f"no wrapper that needs nothing of the family runs: {said}")
    _embed(sketch, features)
    _decoder(sketch, language)
    sketch.draft.content["edges"] = [
        [f"{name}.{features}", f"embed.{features}"], ["embed.inputs_embeds", "decoder.inputs_embeds"],
    ]  # fmt: skip
    _placeholder(sketch, modality)
    sketch.draft.content["modalities"]["text"]["inputs"] = ["input_ids"]
    sketch.modality(modality, list(chosen.component["inputs"]), chosen.sizes)
    sketch.binding(f"{{{modality}}}\n{{text}}")
    sketch.draft.content["generation"] = {"max_new_tokens": 256}


def _images(sketch: Sketch) -> Iterator[Variant]:
    inputs = sketch.image_inputs("images")
    outputs = {"image_features": tensor("float", "feature_rows", 1)}
    yield Variant(_encoder("image", "get_image_features", inputs, outputs, flatten=True), ["images", "feature_rows"])


def _sounds(sketch: Sketch) -> Iterator[Variant]:
    known = parameters(method(sketch.exporter.model, "get_audio_features") or (lambda: None))
    name = next(iter(known), "input_features")
    mask = next((item for item in known if item.endswith("mask")), None)
    mel = sketch.paths.first("mel_bins", "audio")
    if mel is not None and name != "input_values":
        sketch.dimension("mel_bins", mel)
    for wrapper, flags in (("features", {}), ("masked-features", {"feature_mask": tensor("int64", "feature_rows")})):
        outputs = {"audio_features": tensor("float", "feature_rows", 1), **flags}
        for clips in _clips(sketch, name, mask):
            component = _encoder("audio", "get_audio_features", clips.component, outputs, wrapper=wrapper)
            yield Variant(component, ["clips", *clips.dynamic, "feature_rows"], clips.sizes, clips.fixed)


def _clips(sketch: Sketch, name: str, mask: str | None) -> Iterator[Variant]:
    """Yield the inputs of a clip: of any length, then of the length of the encoder's window."""
    if name == "input_values":
        masked = {mask: tensor("int64", "clips", "samples")} if mask else {}
        yield Variant({name: tensor("float", "clips", "samples"), **masked}, ["samples"], {"samples": _SAMPLES})
        return
    masked = {mask: tensor("int64", "clips", "frames")} if mask else {}
    for order in (("mel_bins", "frames"), ("frames", "mel_bins")):
        yield Variant({name: tensor("float", "clips", *order), **masked}, ["frames"], {"frames": _FRAMES})
    window = sketch.paths.first("frames", "audio")
    if window is not None:
        frames = Found(f"{window.expression} * 2", window.value * 2)
        yield Variant({name: tensor("float", "clips", "mel_bins", "frames"), **masked}, [], {}, {"frames": frames})


def _encoder(
    modality: str, called: str, inputs: dict[str, Any], outputs: dict[str, Any], *, wrapper: str = "features",
    flatten: bool = False,
) -> Component:  # fmt: skip
    call = {"wrapper": wrapper, "method": called, **({"flatten": True} if flatten else {})}
    return {"role": "encoder", "modality": modality, "call": call, "inputs": inputs, "outputs": outputs}


def _language(sketch: Sketch) -> Decoder | None:
    """Run the language model and write its sizes; None when it does not run."""
    try:
        found = run_decoder(sketch.exporter, 3 if _axes(sketch) else 1)
    except UnsupportedError as error:
        model: Any = sketch.exporter.model
        rows, width = (int(size) for size in model.get_input_embeddings().weight.shape)
        sketch.size("hidden", "text", width)
        sketch.size("vocabulary", "text", rows)
        sketch.draft.finish(("components", "decoder"), f"the language model does not run by itself: {error.got}")
        return None
    sketch.size("hidden", "text", found.hidden)
    sketch.size("vocabulary", "text", found.vocabulary)
    sketch.size("layers", "text", len(found.keys))
    shapes = {shape for shape in found.keys if shape is not None}
    if shapes:
        shape = min(shapes)
        sketch.size("kv_heads", "text", shape[1])
        sketch.size("head_dim", "text", shape[3])
    _cache_notes(sketch, found)
    return found


def _cache_notes(sketch: Sketch, found: Decoder) -> None:
    place = ("components", "decoder", "cache")
    states = [str(number) for number, shape in enumerate(found.keys) if shape is None]
    if states:
        sketch.draft.finish(place, f"layers {', '.join(states)} keep no keys and values: say what, with `types` and "
                            "`states`, as lfm2-vl does")  # fmt: skip
    if len({shape for shape in found.keys if shape is not None}) > 1:
        sketch.draft.finish(place, "layers have keys of different sizes, which one layout cannot say")
    if found.keys != found.values and not states:
        sketch.draft.finish(place, "values have another size than keys: write their layout as `value`")


def _axes(sketch: Sketch) -> bool:
    """Return True when positions are of time, row and column."""
    part = f"{sketch.paths.text}." if sketch.paths.text else ""
    rope = [sketch.paths.lookup(f"{part}{name}") or {} for name in ("rope_scaling", "rope_parameters")]
    return any(isinstance(item, dict) and "mrope_section" in item for item in rope)


def _embed(sketch: Sketch, features: str) -> None:
    component = {
        "role": "embedding",
        "call": {"wrapper": "vision-embed"},
        "inputs": {
            "input_ids": tensor("int64", "batch", "sequence"), features: tensor("float", "feature_rows", "hidden"),
        },
        "outputs": {"inputs_embeds": tensor("float", "batch", "sequence", "hidden")},
    }  # fmt: skip
    sketch.place("embed", component)


def _decoder(sketch: Sketch, found: Decoder | None) -> None:
    inputs = {
        "inputs_embeds": tensor("float", "batch", "sequence", "hidden"),
        "attention_mask": tensor("int64", "batch", "past+sequence"),
        "position_ids": tensor("int64", *([3] if _axes(sketch) else []), "batch", "sequence"),
    }
    taken = ("inputs_embeds", *(found.inputs if found else ("attention_mask", "position_ids")))
    sizes = sketch.draft.content["dimensions"]
    component = {
        "role": "decoder",
        "call": {"wrapper": found.wrapper if found else "causal-decoder"},
        "inputs": {name: plan for name, plan in inputs.items() if name in taken},
        "cache": {"kind": "concat", "layers": "layers", "layout": ["batch", "kv_heads", "past", "head_dim"]},
        "outputs": {"logits": tensor("float", "batch", "sequence", "vocabulary")},
    }
    for name in ("layers", "kv_heads", "head_dim"):
        if name not in sizes:
            sketch.dimension(name, sketch.paths.first(name, "text") or Found("1", 1, finish="not measured"))
    sketch.place("decoder", component)
    if "token_type_ids" in parameters(sketch.exporter.model.forward):
        sketch.draft.check(
            ("components", "decoder", "inputs"),
            "the model's forward takes token_type_ids: when rows of an image see each other both ways, add it and "
            "binding.token_types, as gemma3 does",
        )


def _placeholder(sketch: Sketch, modality: str) -> None:
    found = sketch.paths.token(_PLACEHOLDERS[modality])
    place = ("placeholders", modality)
    sketch.draft.content["placeholders"][modality] = {"token_id": found.expression if found else "0"}
    if found is None:
        sketch.draft.finish(place, f"no key of the config names the token that stands for a row of {modality}")
    elif not found.expression.rpartition(".")[2].startswith(f"{modality}_token"):
        sketch.draft.check(place, f"the key names no {modality}, but it is the nearest that the config has")

"""Draft an encoder of sound or images before a decoder of text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mcpc.export.derive.configs import Found
from mcpc.export.derive.kinds import main_input, parameters
from mcpc.export.derive.language import Variant, first_that_runs
from mcpc.export.derive.probe import Shape, reason
from mcpc.export.derive.sketch import Component, Sketch, tensor
from mcpc.templates.plan import evaluate

_MASK = "encoder_attention_mask"
_FRAMES, _SAMPLES = (67, 80, 111, 48), (4009, 5000, 7001, 4400)


def draft_seq2seq(sketch: Sketch) -> None:
    """Write encoder and decoder."""
    image = sketch.kind == "image-seq2seq"
    variants = list(_images(sketch) if image else _sounds(sketch))
    chosen, shapes, said = first_that_runs(sketch, variants)
    masked = _MASK in chosen.component["outputs"]
    fixed = not chosen.sizes
    _sizes(sketch, shapes, masked, fixed, image)
    features = "image_features" if image else "audio_features"
    chosen.component["outputs"][features]["shape"] = ["batch", "rows", "hidden"]
    dynamic = [name for name in chosen.dynamic if name not in ("batch", "rows")]
    sketch.draft.content["dynamic"] = ["batch", "sequence", "past", *dynamic, *([] if fixed else ["rows"])]
    heads = ["batch", "heads"]
    cache = {"kind": "concat", "layers": "layers", "layout": [*heads, "past", "head_dim"],
             "cross": [*heads, "rows", "head_dim"]}  # fmt: skip
    sketch.place("encoder", {**chosen.component, "cache": cache, "cross_outputs": True})
    if said:
        sketch.draft.finish(("components", "encoder"), f"no wrapper that needs nothing of the family runs: {said}")
    _decoder(sketch, cache, masked)
    del sketch.draft.content["edges"], sketch.draft.content["placeholders"]
    sketch.draft.content["modalities"]["text"]["inputs"] = ["input_ids"]
    sketch.modality("image" if image else "audio", list(chosen.component["inputs"]), chosen.sizes)
    sketch.binding()
    sketch.draft.content["generation"] = {"max_new_tokens": 224}


def _images(sketch: Sketch) -> Iterator[Variant]:
    yield Variant(_encoder("image", sketch.image_inputs("batch")), ["batch"])


def _sounds(sketch: Sketch) -> Iterator[Variant]:
    name = main_input(sketch.exporter.model)
    masks = ["attention_mask", None] if "attention_mask" in parameters(sketch.exporter.model.forward) else [None]
    if name == "input_values":
        for mask in masks:
            yield _sound(name, ["samples"], mask, ["samples"], {"samples": _SAMPLES})
        return
    mel = sketch.paths.first("mel_bins", "audio")
    sketch.dimension("mel_bins", mel or Found("80", 80, finish="no usual key of the config says how many bins"))
    for mask, order in itertools.product(masks, (["frames", "mel_bins"], ["mel_bins", "frames"])):
        yield _sound(name, order, mask, ["frames"], {"frames": _FRAMES})
    window = sketch.paths.first("frames", "audio")
    if window is not None:
        frames = Found(f"{window.expression} * 2", window.value * 2)
        yield replace(_sound(name, ["mel_bins", "frames"], None, [], {}), fixed={"frames": frames})


def _sound(name: str, shape: list[str], mask: str | None, dynamic: list[str], sizes: dict[str, Any]) -> Variant:
    inputs = {name: tensor("float", "batch", *shape)}
    outputs = {}
    if mask is not None:
        inputs[mask] = tensor("int64", "batch", *dynamic)
        outputs[_MASK] = tensor("int64", "batch", "rows")
    return Variant(_encoder("audio", inputs, outputs), ["batch", *dynamic, "rows"], sizes)


def _encoder(modality: str, inputs: dict[str, Any], more: dict[str, Any] | None = None) -> Component:
    return {
        "role": "encoder",
        "modality": modality,
        "call": {"wrapper": "seq2seq-encoder"},
        "inputs": inputs,
        "outputs": {f"{modality}_features": tensor("float", "batch", 1, 1), **(more or {})},
    }


def _sizes(sketch: Sketch, shapes: Sequence[Shape] | None, masked: bool, fixed: bool, image: bool) -> None:
    """Write the sizes that the encoder's outputs have: rows and keys of each layer of the decoder."""
    section = "vision" if image else "audio"
    rows = _vocabulary(sketch)
    if shapes is None:
        for name, where in (("hidden", section), ("vocabulary", "text"), ("layers", "text"), ("heads", "text"),
                            ("head_dim", "text")):  # fmt: skip
            found = sketch.paths.first(name, where)
            sketch.dimension(
                name, found or Found("1", 1, finish="not measured, and no usual key of the config says it")
            )
        if fixed:
            sketch.dimension("rows", Found("1", 1, finish="not measured: rows of the encoder for one item"))
        return
    keys = shapes[2 if masked else 1 :]
    if fixed:
        sketch.dimension("rows", _rows(sketch, shapes[0][1], image))
    # A projection may bring the rows to the decoder's width.
    width = shapes[0][2]
    sketch.size("hidden", "text" if sketch.paths.of("hidden", section, width).finish else section, width)
    sketch.size("vocabulary", "text", rows)
    sketch.size("layers", "text", len(keys) // 2)
    sketch.size("heads", "text", keys[0][1])
    sketch.size("head_dim", "text", keys[0][3])


def _vocabulary(sketch: Sketch) -> int:
    model: Any = sketch.exporter.model
    head = model.get_output_embeddings()
    if head is None and hasattr(model, "decoder"):
        head = model.decoder.get_output_embeddings()
    return int(head.weight.shape[0]) if head is not None else int(sketch.exporter.embedding_rows or 1)


def _rows(sketch: Sketch, count: int, image: bool) -> Found:
    """Return the expression of the encoder's rows: patches of the image, merged, with or without a class token."""
    patch = sketch.paths.usual("patch_size", "vision") if image else None
    sizes = sketch.draft.content["dimensions"]
    if patch is not None:
        sides = [sizes[name] for name in ("height", "width") if name in sizes] or [sizes["image_size"]] * 2
        for merged, more in itertools.product((1, 2, 4, 8, 16), ("", " + 1", " + 2")):
            shrunk = f" / {merged}" if merged > 1 else ""
            expression = f"{sides[0]} / {patch.expression}{shrunk} * {sides[1]} / {patch.expression}{shrunk}{more}"
            try:
                fits = evaluate(expression, sketch.exporter.config, "rows") == count
            except Exception as error:  # noqa: BLE001 (an expression that does not divide is no candidate)
                fits = not reason(error)
            if fits:
                return Found(expression, count, f"found by its value {count}" if merged > 1 else "")
    found = sketch.paths.first("frames", "audio") if not image else None
    if found is not None and found.value == count:
        return found
    return Found(str(count), count, finish="measured; no formula over the config gives it, so the draft fits no "
                 "checkpoint of another size")  # fmt: skip


def _decoder(sketch: Sketch, cache: dict[str, Any], masked: bool) -> None:
    known = parameters(sketch.exporter.model.forward)
    inputs = {
        "input_ids": tensor("int64", "batch", "sequence"),
        "attention_mask": tensor("int64", "batch", "past+sequence"),
        **({_MASK: tensor("int64", "batch", "rows")} if masked else {}),
    }
    if "decoder_attention_mask" not in known:
        del inputs["attention_mask"]
    component = {
        "role": "decoder",
        "call": {"wrapper": "seq2seq-decoder"},
        "inputs": inputs,
        "cache": dict(cache),
        "outputs": {"logits": tensor("float", "batch", "sequence", "vocabulary")},
    }
    sketch.place("decoder", component)

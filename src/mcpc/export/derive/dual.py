"""Draft a model of two towers that meet in one space."""

from __future__ import annotations

from typing import Any

from mcpc.export.derive.kinds import method, parameters
from mcpc.export.derive.sketch import Component, Sketch, tensor


def draft_dual(sketch: Sketch) -> None:
    """Write both towers and their similarity."""
    images = _image_tower(sketch)
    texts = _text_tower(sketch)
    for name, component, output in (
        ("vision_encoder", images, "image_embeds"), ("text_encoder", texts, "text_embeds"),
    ):  # fmt: skip
        result = sketch.run(component, ["images", "texts", "sequence"], {})
        if isinstance(result, str):
            sketch.draft.finish(("components", name), f"no wrapper that needs nothing of the family runs: {result}")
        elif "projection" not in sketch.draft.content["dimensions"]:
            sketch.size("projection", "text", result[0][-1])
        component["outputs"][output]["shape"][-1] = "projection"
        sketch.place(name, component)
    if "projection" not in sketch.draft.content["dimensions"]:
        sketch.size("projection", "text", int(sketch.exporter.config.get("projection_dim") or 1))
    sketch.draft.content["dynamic"] = ["images", "texts", "sequence"]
    del sketch.draft.content["placeholders"]
    _similarity(sketch)
    sketch.draft.content["modalities"]["text"]["inputs"] = list(texts["inputs"])
    sketch.modality("image", list(images["inputs"]))
    sketch.binding()
    _ends(sketch)


def _image_tower(sketch: Sketch) -> Component:
    return {
        "role": "encoder",
        "modality": "image",
        "call": {"wrapper": "features", "method": "get_image_features"},
        "inputs": sketch.image_inputs("images"),
        "outputs": {"image_embeds": tensor("float", "images", 1)},
    }


def _text_tower(sketch: Sketch) -> Component:
    known = parameters(method(sketch.exporter.model, "get_text_features") or (lambda: None))
    return {
        "role": "encoder",
        "modality": "text",
        "call": {"wrapper": "features", "method": "get_text_features"},
        "inputs": {
            name: tensor("int64", "texts", "sequence") for name in ("input_ids", "attention_mask") if name in known
        },
        "outputs": {"text_embeds": tensor("float", "texts", 1)},
    }


def _similarity(sketch: Sketch) -> None:
    own = dict(sketch.exporter.model.named_parameters(recurse=False))
    call: dict[str, Any] = {"wrapper": "similarity"}
    if "temperature" in own:
        call["scale"] = "1 / temperature"
    elif "logit_scale" not in own:
        call["scale"] = "1"
    if "logit_bias" in own:
        call["bias"] = "logit_bias"
    component = {
        "role": "head",
        "call": call,
        "inputs": {
            "image_embeds": tensor("float", "images", "projection"),
            "text_embeds": tensor("float", "texts", "projection"),
        },
        "outputs": {"logits_per_image": tensor("float", "images", "texts")},
    }
    sketch.place("similarity", component)
    scale = call.get("scale", "exp(logit_scale)")
    sketch.draft.check(
        ("components", "similarity", "call"),
        f"the cosine times {scale}, by the names of the model's parameters; {type(sketch.exporter.model).__name__}"
        ".forward may clamp it or do something else",
    )
    sketch.draft.content["edges"] = [
        ["vision_encoder.image_embeds", "similarity.image_embeds"],
        ["text_encoder.text_embeds", "similarity.text_embeds"],
    ]


def _ends(sketch: Sketch) -> None:
    """Say which token ends a text, where the text tower reads the row of that token."""
    path = f"{sketch.paths.text}.eos_token_id" if sketch.paths.text else "eos_token_id"
    if not isinstance(sketch.paths.lookup(path), int):
        return
    tower: Any = getattr(sketch.exporter.model, "text_model", None)
    if any(hasattr(part, "eos_token_id") for part in (tower, getattr(tower, "text_model", None)) if part):
        sketch.draft.content["binding"]["suffix"] = [f"config.{path}"]
        sketch.draft.check(("binding", "suffix"), "the text tower looks for its end token, so texts must end with it")
    else:
        sketch.draft.check(
            ("binding",), f"where the text tower reads the row of its end token, add suffix: [config.{path}]"
        )

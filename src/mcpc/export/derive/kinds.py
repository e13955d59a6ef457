"""Which kind of model this is, by the methods that its class has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import transformers

from mcpc.errors import UnsupportedError

Kind = Literal["vision-language", "audio-language", "dual-encoder", "speech-seq2seq", "image-seq2seq"]
_IMAGES = ("pixel_values", "flattened_patches")
_SOUND = ("input_features", "input_values")
_INPUTS = frozenset((*_IMAGES, *_SOUND))


def kind_of(model: transformers.PreTrainedModel, where: str) -> tuple[Kind, str]:
    """Return the kind, and the reason when it is a guess.

    Args:
        model: The model.
        where: Its checkpoint, for the message of a refusal.

    Raises:
        UnsupportedError: The class has none of the methods that a kind is known by.
    """
    methods = {
        name for name in ("get_image_features", "get_audio_features", "get_text_features") if method(model, name)
    }
    if "decoder_input_ids" in parameters(model.forward) and getattr(model.config, "is_encoder_decoder", False):
        if main_input(model) in _SOUND:
            return "speech-seq2seq", ""
        if main_input(model) in _IMAGES:
            return "image-seq2seq", ""
    generates = model.can_generate() or model.get_output_embeddings() is not None
    if "get_text_features" in methods and "get_image_features" in methods and not generates:
        return "dual-encoder", ""
    if generates and "get_image_features" in methods:
        also = "the model reads sound as well, which a vision-language package does not"
        return "vision-language", also if "get_audio_features" in methods else ""
    if generates and "get_audio_features" in methods:
        return "audio-language", ""
    if not methods and not _INPUTS & parameters(model.forward).keys():
        raise UnsupportedError(
            f"{type(model).__name__} reads nothing but text; mcpc packages models that read images or sound",
            where=where,
        )
    raise UnsupportedError(
        f"{type(model).__name__} is none of the kinds of model that mcpc packages", where=where,
        expected="get_image_features or get_audio_features beside a language model, get_image_features beside "
        f"get_text_features, or an encoder of {' or '.join((*_IMAGES, *_SOUND))} before a text decoder",
        got=f"main input {main_input(model)}, methods: {', '.join(sorted(methods)) or 'none of them'}",
    )  # fmt: skip


def main_input(model: Any) -> str:
    """Return the name of what the model reads; its encoder's where the model has a name for any encoder."""
    name = str(model.main_input_name)
    known = name in _INPUTS or not hasattr(model, "encoder")
    return name if known else str(getattr(model.encoder, "main_input_name", name))


def method(model: Any, name: str) -> Callable[..., Any] | None:
    """Return a method of the model, or of the base that it holds; the fuller signature of the two."""
    found = [getattr(owner, name, None) for owner in (model, getattr(model, "model", None))]
    callables: list[Callable[..., Any]] = [item for item in found if callable(item)]
    return max(callables, key=lambda item: len(parameters(item)), default=None)


def parameters(function: Callable[..., Any]) -> Mapping[str, bool]:
    """Return {parameter: whether a call must give it}, without `**kwargs`."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        name: item.default is inspect.Parameter.empty
        for name, item in inspect.signature(function).parameters.items()
        if item.kind in named and name != "self"
    }

"""Tiny random checkpoints, one function per model type: what the coverage table is measured on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tiny import audio_language, dual_encoders, experts, packed_vision, seq2seq, speech, tiled_vision, vision_language
from tiny.build import Tiny

#: (model type, architecture) -> how its tiny checkpoint is made.
CHECKPOINTS: Mapping[tuple[str, str], Callable[[], Tiny]] = {
    **audio_language.CHECKPOINTS,
    **dual_encoders.CHECKPOINTS,
    **experts.CHECKPOINTS,
    **packed_vision.CHECKPOINTS,
    **seq2seq.CHECKPOINTS,
    **speech.CHECKPOINTS,
    **tiled_vision.CHECKPOINTS,
    **vision_language.CHECKPOINTS,
}

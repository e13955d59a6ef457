"""`mcpc run`: what the model of a package says about an image, a recording, or texts and images."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcpc.backends.ort import package_runners
from mcpc.core.progress import Progress
from mcpc.core.report import Report
from mcpc.core.runner import RunnerFactory
from mcpc.errors import BadInputError, UnsupportedError, UsageError
from mcpc.inference import DualEncoder, SpeechSeq2Seq, Step, VisionLanguage
from mcpc.inference.greedy import require_generation
from mcpc.package import Package
from mcpc.package.manifest import Manifest, Modality
from mcpc.processing.audio import load_audio
from mcpc.processing.images import load_images
from mcpc.processing.text import TextProcessor

OnText = Callable[[str], None]

#: Which options each kind of package needs, and which it takes besides.
_OPTIONS = {
    "vision-language": ({"--prompt"}, {"--image"}),
    "dual-encoder": ({"--text", "--image"}, set[str]()),
    "speech-seq2seq": ({"--audio"}, set[str]()),
}


@dataclass(frozen=True)
class Request:
    """What is asked of the model."""

    images: tuple[Path, ...] = ()
    prompt: str | None = None
    audio: Path | None = None
    texts: tuple[str, ...] = ()
    max_new_tokens: int | None = None


def run(root: Path, request: Request, *, allow_unverified: bool, on_text: OnText, progress: Progress) -> Report:
    """Answer one request on ONNX Runtime.

    Args:
        root: The package.
        request: What is asked.
        allow_unverified: Accept a package that is marked unverified.
        on_text: Gets each piece of a generated text as soon as it is there.
        progress: Is told the stages.

    Raises:
        UsageError: The request does not suit the kind of package.
        BadInputError: A file or prompt breaks a limit of the package, or is damaged.
    """
    progress.stage("open", str(root))
    package = Package.open(root, allow_unverified=allow_unverified)
    manifest = package.manifest
    _check_request(manifest, request)
    runners = package_runners(root, manifest)
    common = {"package": str(root), "digest": package.digest, "kind": manifest.kind,
              "package_checked": manifest.verification.checked}  # fmt: skip
    match manifest.kind:
        case "dual-encoder":
            data = _scores(root, manifest, runners, request, progress)
        case "speech-seq2seq":
            data = _transcript(root, manifest, runners, request, on_text, progress)
        case _:
            data = _answer(root, manifest, runners, request, on_text, progress)
    return Report("run", data=common | data)


def _check_request(manifest: Manifest, request: Request) -> None:
    """Refuse options that the kind of package does not take, and missing ones."""
    if manifest.kind not in _OPTIONS:
        raise UnsupportedError(
            "this kind of package cannot be run", got=manifest.kind, hint="use its ONNX files directly"
        )
    needed, optional = _OPTIONS[manifest.kind]
    values = {"--image": request.images, "--prompt": request.prompt, "--audio": request.audio, "--text": request.texts}
    given = {option for option, value in values.items() if value not in (None, ())}
    accepted = needed | optional
    if wrong := sorted(given - accepted):
        raise UsageError(f"a {manifest.kind} package takes no {', '.join(wrong)}", expected=", ".join(sorted(accepted)))
    if missing := sorted(needed - given):
        raise UsageError(f"a {manifest.kind} package needs {', '.join(missing)}", expected=", ".join(sorted(accepted)))
    if request.max_new_tokens is not None and manifest.kind == "dual-encoder":
        raise UsageError("a dual-encoder package generates nothing", got="--max-new-tokens")


def _modality(manifest: Manifest, name: str) -> Modality:
    modality = manifest.modalities.get(name)
    if modality is None:
        declared = ", ".join(manifest.modalities) or "none"
        raise BadInputError(f"the package declares no {name} input", where="manifest.modalities", got=declared)
    return modality


def _answer(
    root: Path, manifest: Manifest, runners: RunnerFactory, request: Request, on_text: OnText, progress: Progress
) -> dict[str, Any]:
    text = TextProcessor.open(root, manifest)
    ids = text.prompt_ids(str(request.prompt), len(request.images))
    pixels = load_images(request.images, _modality(manifest, "image")) if request.images else None
    limit = _limit(manifest, request, len(ids))
    model = VisionLanguage(manifest, runners)
    progress.stage("answer")
    steps = model.greedy(ids, pixels, max_new_tokens=limit)
    return {"images": [str(path) for path in request.images], "prompt_tokens": len(ids)} | _generate(
        manifest, text, steps, on_text
    )


def _transcript(
    root: Path, manifest: Manifest, runners: RunnerFactory, request: Request, on_text: OnText, progress: Progress
) -> dict[str, Any]:
    text = TextProcessor.open(root, manifest)
    features = load_audio(Path(str(request.audio)), _modality(manifest, "audio"))
    limit = _limit(manifest, request, len(require_generation(manifest).decoder_start_ids))
    model = SpeechSeq2Seq(manifest, runners)
    progress.stage("transcribe", str(request.audio))
    steps = model.greedy(features, max_new_tokens=limit)
    return {"audio": str(request.audio)} | _generate(manifest, text, steps, on_text)


def _limit(manifest: Manifest, request: Request, prompt_tokens: int) -> int:
    """Return how many tokens may be generated: what was asked for, within the model's context."""
    wanted = request.max_new_tokens or require_generation(manifest).max_new_tokens
    if manifest.binding is None:
        return wanted
    room = manifest.binding.max_tokens - prompt_tokens
    if room < 1:
        raise BadInputError(
            "the prompt leaves no room for an answer",
            expected=f"fewer than {manifest.binding.max_tokens} tokens",
            got=f"{prompt_tokens}",
        )
    return min(wanted, room)


def _generate(manifest: Manifest, text: TextProcessor, steps: Iterator[Step], on_text: OnText) -> dict[str, Any]:
    """Consume the steps, give out their text, and return text, tokens and times."""
    stream, pieces, tokens, times_ms = text.stream(), [""], [], []
    started = time.perf_counter()
    for step in steps:
        now = time.perf_counter()
        times_ms.append((now - started) * 1e3)
        started = now
        tokens.append(step.token)
        _give(stream.add(step.token), pieces, on_text)
    _give(stream.finish(), pieces, on_text)
    return {
        "text": "".join(pieces),
        "tokens": tokens,
        "finish": "eos" if tokens[-1] in require_generation(manifest).eos_token_ids else "length",
        "timings": _timings(times_ms),
    }


def _give(piece: str, pieces: list[str], on_text: OnText) -> None:
    """Pass a piece on; blanks before the first word are dropped."""
    if not any(pieces):
        piece = piece.lstrip()
    if piece:
        pieces.append(piece)
        on_text(piece)


def _timings(times_ms: Sequence[float]) -> dict[str, Any]:
    """Return times of the encoder and prompt together (`prefill_ms`), and of the steps after it."""
    after = times_ms[1:]
    return {
        "prefill_ms": round(times_ms[0], 3),
        "step_ms_median": round(statistics.median(after), 3) if after else None,
        "tokens_per_s": round(len(after) / sum(after) * 1e3, 1) if after else None,
    }


def _scores(
    root: Path, manifest: Manifest, runners: RunnerFactory, request: Request, progress: Progress
) -> dict[str, Any]:
    input_ids, mask = TextProcessor.open(root, manifest).batch(request.texts)
    pixels = load_images(request.images, _modality(manifest, "image"))
    model = DualEncoder(manifest, runners)
    progress.stage("score", f"{len(request.images)} images, {len(request.texts)} texts")
    logits = model.scores(model.encode_images(pixels), model.encode_texts(input_ids, mask)).astype(np.float64)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return {
        "images": [str(path) for path in request.images],
        "texts": list(request.texts),
        "logits": logits.tolist(),
        "probabilities": (exponentials / exponentials.sum(axis=1, keepdims=True)).tolist(),
    }

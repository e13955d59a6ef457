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
from mcpc.inference import DualEncoder, Seq2Seq, Step, VisionLanguage
from mcpc.inference.greedy import require_generation
from mcpc.package import Package
from mcpc.package.manifest import Manifest, Modality
from mcpc.processing.audio import load_audio
from mcpc.processing.images import load_images
from mcpc.processing.text import TextProcessor

OnText = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is asked of the model."""

    images: tuple[Path, ...] = ()
    prompt: str | None = None
    audio: Path | None = None
    texts: tuple[str, ...] = ()
    max_new_tokens: int | None = None
    truncate: bool = False


@dataclass(frozen=True)
class _Call:
    """A request on its way through the chain of one package."""

    package: Package
    request: Request
    on_text: OnText
    progress: Progress

    @property
    def manifest(self) -> Manifest:
        return self.package.manifest

    def text(self) -> TextProcessor:
        return TextProcessor.open(self.package.root, self.manifest)

    def modality(self, name: str) -> Modality:
        modality = self.manifest.modalities.get(name)
        if modality is None:
            declared = ", ".join(self.manifest.modalities) or "none"
            raise BadInputError(f"the package declares no {name} input", where="manifest.modalities", got=declared)
        return modality

    def load(self) -> tuple[RunnerFactory, float]:
        """Return runners of every component, opened, and the milliseconds that took."""
        started = time.perf_counter()
        self.progress.stage("load", ", ".join(component.name for component in self.manifest.components))
        runners = package_runners(self.package.root, self.manifest, accuracy_level=None)
        for component in self.manifest.components:
            runners(component.name)
        return runners, _ms_since(started)


def run(root: Path, request: Request, *, allow_unverified: bool, on_text: OnText, progress: Progress) -> Report:
    """Answer one request on ONNX Runtime.

    The request is checked as a whole before any weights are loaded.

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
    kind = package.manifest.kind
    if kind not in _CHAINS:
        raise UnsupportedError("this kind of package cannot be run", got=kind, hint="use its ONNX files directly")
    _check_request(kind, request)
    data = _CHAINS[kind].answer(_Call(package, request, on_text, progress))
    checked = package.manifest.verification.checked
    common = {"package": str(root), "digest": package.digest, "kind": kind, "package_checked": checked}
    return Report("run", data=common | data)


def _check_request(kind: str, request: Request) -> None:
    """Refuse options that the kind of package does not take, missing ones, and blank texts."""
    chain = _CHAINS[kind]
    accepted = chain.needed | chain.optional
    values = {
        "--image": request.images,
        "--prompt": request.prompt,
        "--audio": request.audio,
        "--text": request.texts,
        "--max-new-tokens": request.max_new_tokens,
        "--truncate": request.truncate or None,
    }
    given = {option for option, value in values.items() if value not in (None, ())}
    expected, got = ", ".join(sorted(accepted)), ", ".join(sorted(given)) or "no option"
    if wrong := sorted(given - accepted):
        raise UsageError(f"a {kind} package takes no {', '.join(wrong)}", expected=expected, got=got)
    if missing := sorted(chain.needed - given):
        raise UsageError(f"a {kind} package needs {', '.join(missing)}", expected=expected, got=got)
    blank = [text for text in (request.prompt, *request.texts) if text is not None and not text.strip()]
    if blank:
        raise UsageError("a text is blank", got=repr(blank[0]))


def _answer(call: _Call) -> dict[str, Any]:
    images, text, prompt = call.request.images, call.text(), str(call.request.prompt)
    binding = call.manifest.binding
    if call.request.truncate or (binding and binding.truncation.policy == "proportional"):
        prompt, kept = text.cut(prompt, len(images), _room(call))
        images = images[:kept]
    ids = text.prompt_ids(prompt, len(images))
    pixels = load_images(images, call.modality("image")) if images else None
    limit = _limit(call, len(ids))
    runners, load_ms = call.load()
    steps = VisionLanguage(call.manifest, runners).greedy(ids, pixels, max_new_tokens=limit)
    return {
        "images": [str(path) for path in images],
        "prompt_tokens": len(ids),
        "cut": {
            "images": len(call.request.images) - len(images),
            "characters": len(str(call.request.prompt)) - len(prompt),
        },
        **_generate(call, text, steps, load_ms),
    }


def _transcript(call: _Call) -> dict[str, Any]:
    path, text = Path(str(call.request.audio)), call.text()
    features = load_audio(path, call.modality("audio"))
    limit = _limit(call, len(require_generation(call.manifest).decoder_start_ids))
    runners, load_ms = call.load()
    steps = Seq2Seq(call.manifest, runners).greedy({"input_features": features}, max_new_tokens=limit)
    return {"audio": str(path), **_generate(call, text, steps, load_ms)}


def _caption(call: _Call) -> dict[str, Any]:
    images, text = call.request.images, call.text()
    if len(images) != 1:
        raise UsageError("this package reads one image", where="--image", expected="1", got=str(len(images)))
    pixels = load_images(images, call.modality("image"))
    limit = _limit(call, len(require_generation(call.manifest).decoder_start_ids))
    runners, load_ms = call.load()
    steps = Seq2Seq(call.manifest, runners).greedy({"pixel_values": pixels}, max_new_tokens=limit)
    return {"images": [str(path) for path in images], **_generate(call, text, steps, load_ms)}


def _scores(call: _Call) -> dict[str, Any]:
    images, texts = call.request.images, call.request.texts
    input_ids, mask = call.text().batch(texts)
    pixels = load_images(images, call.modality("image"))
    runners, load_ms = call.load()
    call.progress.stage("score", f"{len(images)} images, {len(texts)} texts")
    started = time.perf_counter()
    model = DualEncoder(call.manifest, runners)
    logits = model.scores(
        model.encode_images({"pixel_values": pixels}),
        model.encode_texts({"input_ids": input_ids, "attention_mask": mask}),
    ).astype(np.float64)
    score_ms = _ms_since(started)
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return {
        "images": [str(path) for path in images],
        "texts": list(texts),
        "logits": logits.tolist(),
        "probabilities": (exponentials / exponentials.sum(axis=1, keepdims=True)).tolist(),
        "timings": {"load_ms": load_ms, "score_ms": score_ms},
    }


@dataclass(frozen=True)
class _Chain:
    """What answers for one kind of package, and the options it needs and takes besides."""

    answer: Callable[[_Call], dict[str, Any]]
    needed: frozenset[str]
    optional: frozenset[str] = frozenset()


_CHAINS = {
    "vision-language": _Chain(
        _answer, frozenset({"--prompt"}), frozenset({"--image", "--max-new-tokens", "--truncate"})
    ),
    "speech-seq2seq": _Chain(_transcript, frozenset({"--audio"}), frozenset({"--max-new-tokens"})),
    "image-seq2seq": _Chain(_caption, frozenset({"--image"}), frozenset({"--max-new-tokens"})),
    "dual-encoder": _Chain(_scores, frozenset({"--image", "--text"})),
}


def _room(call: _Call) -> int:
    """Return how many tokens a prompt may have when it is cut: the context less the answer, half of it at least."""
    wanted = call.request.max_new_tokens or require_generation(call.manifest).max_new_tokens
    context = call.manifest.binding.max_tokens if call.manifest.binding else 0
    return context - min(wanted, context // 2)


def _limit(call: _Call, prompt_tokens: int) -> int:
    """Return how many tokens may be generated: what was asked for, within the model's context."""
    wanted = call.request.max_new_tokens or require_generation(call.manifest).max_new_tokens
    if call.manifest.binding is None:
        return wanted
    context = call.manifest.binding.max_tokens
    if prompt_tokens >= context:
        expected = f"fewer than {context} tokens"
        raise BadInputError("the prompt leaves no room for an answer", expected=expected, got=f"{prompt_tokens}")
    return min(wanted, context - prompt_tokens)


def _generate(call: _Call, text: TextProcessor, steps: Iterator[Step], load_ms: float) -> dict[str, Any]:
    """Consume the steps, give out their text, and return text, tokens and times."""
    call.progress.stage("generate")
    stream = text.stream()
    pieces: list[str] = []
    tokens: list[int] = []
    times_ms: list[float] = []
    started = time.perf_counter()
    for step in steps:
        times_ms.append(_ms_since(started))
        tokens.append(step.token)
        _give(stream.add(step.token), pieces, call.on_text)
        started = time.perf_counter()
    _give(stream.finish(), pieces, call.on_text)
    return {
        "text": "".join(pieces),
        "tokens": tokens,
        "finish": "eos" if tokens[-1] in require_generation(call.manifest).eos_token_ids else "length",
        "timings": {"load_ms": load_ms, **_timings(times_ms)},
    }


def _give(piece: str, pieces: list[str], on_text: OnText) -> None:
    """Pass a piece on; blanks before the first word are dropped."""
    if not pieces:
        piece = piece.lstrip()
    if piece:
        pieces.append(piece)
        on_text(piece)


def _timings(times_ms: Sequence[float]) -> dict[str, Any]:
    """Return times of the encoder and prompt together (`prefill_ms`), and of the steps after it."""
    after = times_ms[1:]
    return {
        "prefill_ms": times_ms[0],
        "step_ms_median": round(statistics.median(after), 3) if after else None,
        "tokens_per_s": round(len(after) / sum(after) * 1e3, 1) if after else None,
    }


def _ms_since(started: float) -> float:
    return round((time.perf_counter() - started) * 1e3, 3)

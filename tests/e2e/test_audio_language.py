"""A language model that reads sound: rows of padding are dropped, and what cannot be done is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import torch
import transformers
from tiny import audio_language as tiny
from tiny.build import write

from mcpc.backends.ort import package_runners
from mcpc.core.progress import Silent
from mcpc.errors import BadInputError, UnsupportedError
from mcpc.inference import AudioLanguage
from mcpc.package import Package
from mcpc.workflows.convert import convert
from mcpc.workflows.run import Request, run

FRAMES, MEL_BINS = 120, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("audio") / "checkpoint"
    write("Qwen2AudioForConditionalGeneration", tiny.qwen2_audio(), root)
    return root


@pytest.fixture(scope="module")
def package(checkpoint: Path) -> Path:
    root = checkpoint.parent / "package"
    convert(checkpoint, root, verify="none", progress=Silent())
    return root


@pytest.fixture
def chain(package: Path) -> AudioLanguage:
    opened = Package.open(package, allow_unverified=True)
    return AudioLanguage(opened.manifest, package_runners(package, opened.manifest))


def clips(*shown: int) -> dict[str, np.ndarray]:
    """Return noise of which the first frames are sound."""
    noise = np.random.default_rng(3).standard_normal((len(shown), MEL_BINS, FRAMES)).astype(np.float32)
    mask = (np.arange(FRAMES) < np.array(shown)[:, None]).astype(np.int64)
    return {"input_features": noise, "feature_attention_mask": mask}


def test_clips_of_different_lengths_in_one_batch_are_read_as_pytorch_reads_them(
    checkpoint: Path, chain: AudioLanguage
) -> None:
    sound = clips(120, 77, 9)
    rows = [30, 19, 2]
    ids = np.full((3, 36), 7, np.int64)
    for prompt, count in zip(ids, rows, strict=True):
        prompt[2 : 2 + count] = tiny.AUDIO
    assert len(chain.features(sound)) == sum(rows)
    model = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(checkpoint).eval()
    feeds = {**sound, "input_ids": ids, "attention_mask": np.ones_like(ids)}
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in feeds.items()}).logits.numpy()
    assert np.abs(chain.prefill(ids, sound)[1] - expected).max() < 1e-4


def test_placeholders_must_match_the_rows_that_are_left(chain: AudioLanguage) -> None:
    ids = np.full((1, 40), 7, np.int64)
    ids[0, :30] = tiny.AUDIO
    assert chain.prefill(ids, clips(120))[1].shape[:2] == (1, 40)
    with pytest.raises(BadInputError, match="placeholders do not match"):
        chain.prefill(ids, clips(118 - 40))


def test_running_on_a_sound_file_is_refused_by_name(package: Path) -> None:
    assert "not described" in str(Package.open(package, allow_unverified=True).manifest.modalities["audio"])
    with pytest.raises(UnsupportedError, match="cannot be run"):
        request = Request(prompt="a", audio=Path("a.wav"))
        run(package, request, allow_unverified=True, on_text=lambda _: None, progress=Silent())


def test_granite_speech_with_an_adapter_is_refused_before_work(tmp_path: Path) -> None:
    made = tiny.CHECKPOINTS["granite_speech", "GraniteSpeechForConditionalGeneration"]()
    made.config.has_lora_adapter = True
    write("GraniteSpeechForConditionalGeneration", made, tmp_path / "checkpoint")
    with pytest.raises(UnsupportedError) as caught:
        convert(tmp_path / "checkpoint", tmp_path / "package", dry_run=True, progress=Silent())
    assert "config has_lora_adapter is True, not False" in str(caught.value.problems[0])

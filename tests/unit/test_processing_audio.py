"""Log-mel features equal transformers' numpy path bit for bit; WAV files are read exactly or refused."""

from __future__ import annotations

import io
import os
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcpc.core.runner import Array
from mcpc.errors import BadInputError, UnsupportedError
from mcpc.package.manifest import Modality
from mcpc.processing.audio import decode_wav, load_audio, log_mel
from mcpc.processing.configs import audio_preprocess_from_config

WHISPER = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "sampling_rate": 16000,
    "n_samples": 480000,
    "nb_max_frames": 3000,
}


def modality(**fields: Any) -> Modality:
    defaults: dict[str, Any] = {"inputs": ("input_features",), "mime_types": ("audio/wav",),
                                "preprocess": audio_preprocess_from_config(WHISPER)}  # fmt: skip
    return Modality(**(defaults | fields))


def wav(samples: bytes, width: int = 2, channels: int = 1, rate: int = 16000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(samples)
    return buffer.getvalue()


def speech_like(seconds: float) -> Array:
    rng = np.random.default_rng(0)
    time = np.arange(int(seconds * 16000)) / 16000
    tone = np.sin(2 * np.pi * 440 * time) * np.exp(-time) + 0.3 * np.sin(2 * np.pi * 3100 * time)
    return (0.3 * tone + 0.01 * rng.standard_normal(time.size)).astype(np.float32)


@pytest.mark.parametrize("mel_bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.01, 3.7, 30.0])
def test_log_mel_equals_transformers(seconds: float, mel_bins: int) -> None:
    whisper = pytest.importorskip("transformers.models.whisper.feature_extraction_whisper")
    extractor = whisper.WhisperFeatureExtractor(feature_size=mel_bins)
    waveform = speech_like(seconds)
    padded = np.pad(waveform, (0, 480000 - waveform.size))
    expected = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    actual = log_mel(waveform, audio_preprocess_from_config(WHISPER | {"feature_size": mel_bins}))
    assert actual.shape == (mel_bins, 3000)
    np.testing.assert_array_equal(actual, expected)


def test_log_mel_is_near_the_torch_path() -> None:
    """transformers takes this path when torch is installed; it computes in float32, hence the tolerance."""
    whisper = pytest.importorskip("transformers.models.whisper.feature_extraction_whisper")
    pytest.importorskip("torch")
    waveform = speech_like(2.0)
    expected = whisper.WhisperFeatureExtractor()(waveform, sampling_rate=16000, return_tensors="np")["input_features"][
        0
    ]
    difference = np.abs(log_mel(waveform, audio_preprocess_from_config(WHISPER)) - expected).max()
    assert difference <= 2e-4


def test_a_real_clip_equals_transformers() -> None:
    if "MCPC_ASSETS" not in os.environ:
        pytest.skip("MCPC_ASSETS is not set: no speech clips")
    whisper = pytest.importorskip("transformers.models.whisper.feature_extraction_whisper")
    path = Path(os.environ["MCPC_ASSETS"]) / "data" / "speech" / "goforward.wav"
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    padded = np.pad(samples, (0, 480000 - samples.size))
    expected = whisper.WhisperFeatureExtractor()._np_extract_fbank_features(padded[None], "cpu")
    np.testing.assert_array_equal(load_audio(path, modality()), expected)


def test_every_width_gives_the_same_samples() -> None:
    levels = np.array([-128, -64, 0, 1, 127], np.int64)
    forms = {
        1: (levels + 128).astype(np.uint8).tobytes(),
        2: (levels << 8).astype("<i2").tobytes(),
        3: b"".join(int(level << 16).to_bytes(3, "little", signed=True) for level in levels),
        4: (levels << 24).astype("<i4").tobytes(),
    }
    for width, samples in forms.items():
        np.testing.assert_array_equal(
            decode_wav(wav(samples, width), modality(), "x"), (levels / 128).astype(np.float32)
        )


def test_channels_are_averaged() -> None:
    samples = np.array([[16384, -16384], [8192, 0]], "<i2").tobytes()
    np.testing.assert_array_equal(
        decode_wav(wav(samples, channels=2), modality(), "x"), np.array([0, 0.125], np.float32)
    )


def test_limits_are_kept_before_decoding() -> None:
    second = bytes(2 * 16000)
    with pytest.raises(BadInputError, match="sampling rate") as caught:
        decode_wav(wav(second, rate=8000), modality(), "x")
    assert "ffmpeg" in caught.value.hint
    with pytest.raises(BadInputError, match="too long"):
        decode_wav(wav(second * 2), modality(max_duration_s=1.5), "x")
    with pytest.raises(BadInputError, match="at most 30 s"):
        decode_wav(wav(second * 31), modality(), "x")
    assert decode_wav(wav(second * 30), modality(), "x").size == 480000
    with pytest.raises(BadInputError, match="no samples"):
        decode_wav(wav(b""), modality(), "x")


@pytest.mark.parametrize("cut", [10, 30, 50, -1, -1000])
def test_a_truncated_file_is_refused(cut: int) -> None:
    with pytest.raises(BadInputError, match=r"damaged|truncated"):
        decode_wav(wav(bytes(4000))[:cut], modality(), "x")


def test_a_float_wav_is_refused_with_a_way_out() -> None:
    data = bytearray(wav(bytes(64)))
    data[20:22] = (3).to_bytes(2, "little")  # WAVE_FORMAT_IEEE_FLOAT
    with pytest.raises(UnsupportedError, match="PCM") as caught:
        decode_wav(bytes(data), modality(), "x")
    assert "ffmpeg" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"feature_extractor_type": "Wav2Vec2FeatureExtractor"}, "Wav2Vec2FeatureExtractor"),
        ({"dither": 0.1}, "dither"),
        ({"do_normalize": True}, "do_normalize"),
        ({"padding_side": "left"}, "padding_side"),
        ({"pre_emphasis": 0.97}, "pre_emphasis"),
    ],
)
def test_an_unknown_step_is_refused(change: dict[str, Any], text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        audio_preprocess_from_config(WHISPER | change)
    assert text in str(caught.value)

"""WAV files to mono waveforms, and waveforms to log-mel features as Whisper defines them."""

from __future__ import annotations

import io
import wave
from functools import lru_cache
from pathlib import Path

import numpy as np

from mcpc.core.runner import Array
from mcpc.errors import BadInputError, UnsupportedError
from mcpc.package.manifest import AudioPreprocess, Modality
from mcpc.processing.media import read_media

_MEL_FLOOR = 1e-10  # Source: Whisper `log_mel_spectrogram`
_DYNAMIC_RANGE = 8.0  # decades below the loudest bin, same source
_MAX_FREQUENCY_HZ = 8000.0  # Source: transformers `WhisperFeatureExtractor`


def load_audio(path: Path, modality: Modality) -> Array:
    """Return `input_features` [1, mel, frames] float32 of a WAV file.

    Raises:
        BadInputError: The file breaks a limit, is damaged, or has another sampling rate.
        UnsupportedError: It is not PCM.
    """
    if not isinstance(modality.preprocess, AudioPreprocess):
        raise UnsupportedError(
            modality.preprocess_refused or "the package declares no audio preprocessing",
            where="manifest.modalities.audio.preprocess",
        )
    waveform = decode_wav(read_media(path, modality), modality, str(path))
    return log_mel(waveform, modality.preprocess)[None]


def decode_wav(data: bytes, modality: Modality, where: str) -> Array:
    """Return the mono waveform [samples] float32 in -1..1 of a PCM WAV file; channels are averaged.

    Raises:
        BadInputError: Damaged or empty data, a sampling rate that is not the model's, or too long.
        UnsupportedError: Not PCM of 8, 16, 24 or 32 bits.
    """
    steps = modality.preprocess
    try:
        with wave.open(io.BytesIO(data)) as file:
            rate, frames, channels, width = (
                file.getframerate(),
                file.getnframes(),
                file.getnchannels(),
                file.getsampwidth(),
            )
            if isinstance(steps, AudioPreprocess):
                _check_length(rate, frames, steps, modality.max_duration_s, where)
            raw = file.readframes(frames)
    except wave.Error as error:
        if "unknown format" in str(error):
            raise UnsupportedError(
                "only PCM WAV files can be read",
                where=where,
                got=str(error),
                hint="ffmpeg -i IN -c:a pcm_s16le OUT.wav",
            ) from None
        raise BadInputError("the WAV file is damaged", where=where, got=str(error)) from None
    except EOFError:
        raise BadInputError("the WAV file is damaged", where=where, got="its header ends early") from None
    if len(raw) != frames * channels * width:
        raise BadInputError(
            "the WAV file is truncated",
            where=where,
            expected=f"{frames * channels * width} bytes of samples",
            got=f"{len(raw)}",
        )
    mono: Array = _samples(raw, width, where).reshape(frames, channels).mean(axis=1, dtype=np.float32)
    return mono


def _check_length(rate: int, frames: int, steps: AudioPreprocess, max_duration_s: float | None, where: str) -> None:
    if rate != steps.sampling_rate_hz:
        raise BadInputError(
            "the sampling rate is not the model's",
            where=where,
            expected=f"{steps.sampling_rate_hz} Hz",
            got=f"{rate} Hz",
            hint=f"ffmpeg -i IN -ar {steps.sampling_rate_hz} -ac 1 OUT.wav",
        )
    if frames == 0:
        raise BadInputError("the WAV file holds no samples", where=where)
    limit = steps.chunk_s if max_duration_s is None else min(max_duration_s, steps.chunk_s)
    if frames > limit * rate:
        raise BadInputError(
            "the audio is too long",
            where=where,
            expected=f"at most {limit:g} s",
            got=f"{frames / rate:.2f} s",
            hint="cut it into pieces of that length",
        )


def _samples(raw: bytes, width: int, where: str) -> Array:
    """Return float32 samples of little-endian PCM; 8 bits are unsigned, wider ones signed."""
    match width:
        case 1:
            return (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
        case 2:
            return np.frombuffer(raw, "<i2").astype(np.float32) / 32768
        case 3:
            padded = np.zeros((len(raw) // 3, 4), np.uint8)
            padded[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
            return (padded.view("<i4")[:, 0] / 2147483648).astype(np.float32)
        case 4:
            return (np.frombuffer(raw, "<i4") / 2147483648).astype(np.float32)
    raise UnsupportedError(
        "this sample width cannot be read", where=where, expected="8, 16, 24 or 32 bits", got=f"{8 * width} bits"
    )


def log_mel(waveform: Array, steps: AudioPreprocess) -> Array:
    """Return the log-mel features [mel, frames] float32 of a mono waveform [samples].

    The waveform is padded to `chunk_s`; a longer one is refused, not cut.

    Raises:
        BadInputError: The waveform is longer than `chunk_s`.

    Source: Radford et al. 2022, section 2.2; transformers `WhisperFeatureExtractor._np_extract_fbank_features`.
    """
    total = steps.chunk_s * steps.sampling_rate_hz
    if waveform.size > total:
        raise BadInputError(
            "the audio is too long",
            expected=f"at most {steps.chunk_s} s",
            got=f"{waveform.size / steps.sampling_rate_hz:.2f} s",
        )
    padded = np.pad(waveform.astype(np.float32), (0, total - waveform.size), constant_values=steps.padding_value)
    power = _power_spectrogram(padded, steps.n_fft, steps.hop_length)
    filters = mel_filters(steps.mel_bins, steps.n_fft, steps.sampling_rate_hz)
    mel = np.log10(np.maximum(_MEL_FLOOR, np.dot(filters.T, power))).astype(np.float32)[:, :-1]
    mel = np.maximum(mel, mel.max() - _DYNAMIC_RANGE)
    return np.ascontiguousarray((mel + 4.0) / 4.0, dtype=np.float32)


def _power_spectrogram(waveform: Array, n_fft: int, hop_length: int) -> Array:
    """Return |STFT|^2 [bins, frames] float64: reflected at both ends, periodic Hann window."""
    padded = np.pad(waveform, n_fft // 2, mode="reflect").astype(np.float64)
    frames = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop_length]
    window = np.hanning(n_fft + 1)[:-1]
    # transformers keeps the spectrum in complex64; so do we, for the same bits.
    spectrum = np.fft.rfft(frames * window, axis=1).astype(np.complex64)
    power: Array = np.abs(spectrum, dtype=np.float64) ** 2.0
    return power.T


@lru_cache(maxsize=4)
def mel_filters(mel_bins: int, n_fft: int, sampling_rate_hz: int) -> Array:
    """Return triangular mel filters [bins, mel] float64 of equal area, from 0 to 8 kHz.

    Source: Slaney 1998, Auditory Toolbox: linear below 1 kHz (66.67 Hz a mel), 27 mels per factor 6.4 above.
    """
    edges_mel = np.linspace(0.0, _mel(_MAX_FREQUENCY_HZ), mel_bins + 2)
    log_step = np.log(6.4) / 27.0
    edges_hz = np.where(edges_mel >= 15.0, 1000.0 * np.exp(log_step * (edges_mel - 15.0)), 200.0 * edges_mel / 3.0)
    bins_hz = np.linspace(0, sampling_rate_hz // 2, n_fft // 2 + 1)
    widths = np.diff(edges_hz)
    slopes = edges_hz[None, :] - bins_hz[:, None]
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    triangles: Array = np.maximum(0.0, np.minimum(rising, falling))
    return triangles * (2.0 / (edges_hz[2:] - edges_hz[:-2]))


def _mel(frequency_hz: float) -> float:
    """Return the mels of a frequency at or above 1 kHz."""
    return 15.0 + float(np.log(frequency_hz / 1000.0)) * (27.0 / float(np.log(6.4)))

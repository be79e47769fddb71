"""Reads audio files as mono samples at a given rate, and their length without decoding.

PyAV decodes every listed format; scipy resamples.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from math import ceil, gcd

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer

from dflop_jax.data.bounds import MAX_CHANNELS, MAX_RATE_HZ, MAX_RESAMPLING, MIN_RATE_HZ, one_line
from dflop_jax.data.datasets.blob import MediaFile
from dflop_jax.data.media.container import check_duration, open_container

# Windowed-sinc filter: zero crossings per side, and its passband as a share of the lower Nyquist.
ZERO_CROSSINGS, PASSBAND_FRACTION, KAISER_BETA = 64, 0.94, 9.0
ESTIMATED_FORMATS = ("aac", "amr", "mp3")  # FFmpeg estimates their length from the first bit rate
logger = logging.getLogger("dflop_jax.data")


def count_samples(path: MediaFile, rate_hz: int) -> int:
    """Return the number of samples of an audio file at `rate_hz`, from its header or packets.
    ValueError: the file is not audio, or is empty."""
    with open_container(path, "audio file") as container:
        stream = _stream(container, rate_hz)
        n_samples = ceil(_length_s(container, stream) * rate_hz)
        if n_samples < 1:
            raise ValueError("it holds no samples")
        check_duration(n_samples / rate_hz)
    return n_samples


def read_sound(path: MediaFile, n_samples: int, rate_hz: int) -> np.ndarray:
    """Return the first `n_samples` of an audio file at `rate_hz`, averaged over channels, float32
    [n_samples] in -1..1. If it breaks off, the rest is silence and a warning is logged; ValueError
    if that is more than half."""
    with open_container(path, "audio file") as container:
        stream = _stream(container, rate_hz)
        native_hz = stream.rate
        # the resampling filter also reads samples after the last one
        reach = ZERO_CROSSINGS * max(1, native_hz / rate_hz)
        native, reason = _decode(container, stream, ceil(n_samples * native_hz / rate_hz + reach))
        sound = resample(native, native_hz, rate_hz)[:n_samples]
    missing = n_samples - len(sound)
    if 2 * missing > n_samples or not len(sound):
        raise ValueError(f"{path}: only {len(sound)} of {n_samples} samples decode ({reason})")
    # the header of compressed audio may be wrong by a frame or two of the codec
    if missing > rate_hz // 10:
        logger.warning("%s: %d samples of silence appended (%s)", path, missing, reason)
    return np.pad(sound, (0, missing))


def resample(sound: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """Return band-limited resampled audio, float32 [ceil(n * to_hz / from_hz)]."""
    if from_hz == to_hz or not len(sound):
        return sound.astype(np.float32)
    from scipy import signal  # takes seconds to load, and most runs do not need it

    numerator, denominator = to_hz // gcd(from_hz, to_hz), from_hz // gcd(from_hz, to_hz)
    factor, window = max(numerator, denominator), ("kaiser", KAISER_BETA)
    taps = signal.firwin(2 * ZERO_CROSSINGS * factor + 1, PASSBAND_FRACTION / factor, window=window)
    resampled = signal.resample_poly(sound.astype(np.float64), numerator, denominator, window=taps)
    return resampled.astype(np.float32)


def _stream(container: InputContainer, rate_hz: int) -> AudioStream:
    """Return the first audio stream. ValueError: it cannot be decoded or resampled to `rate_hz`."""
    if not container.streams.audio:
        raise ValueError("it holds no audio stream")
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise ValueError("its codec is unknown")
    native_hz, channels = stream.rate, stream.codec_context.channels
    if not MIN_RATE_HZ <= native_hz <= MAX_RATE_HZ:
        raise ValueError(f"a sampling rate of {native_hz} Hz is out of bounds")
    if native_hz // gcd(native_hz, rate_hz) > MAX_RESAMPLING:
        raise ValueError(f"no filter resamples {native_hz} to {rate_hz} Hz; resample the file")
    if channels > MAX_CHANNELS:
        raise ValueError(f"it has {channels} channels, more than {MAX_CHANNELS}")
    return stream


def _length_s(container: InputContainer, stream: AudioStream) -> Fraction:
    if container.format.name not in ESTIMATED_FORMATS or stream.start_time:  # a delay (Xing)
        if stream.duration and stream.time_base:
            return stream.duration * stream.time_base
        if container.duration:
            return Fraction(container.duration, av.time_base)
    ticks = sum(packet.duration or 0 for packet in container.demux(stream))
    return ticks * (stream.time_base or Fraction(1, stream.rate))


def _decode(container: InputContainer, stream: AudioStream, n_left: int) -> tuple[np.ndarray, str]:
    """Return up to `n_left` samples at the file's own rate, and the reason if there are fewer."""
    to_float = AudioResampler(format="fltp")
    chunks, reason = [np.zeros(0, np.float32)], "it ends before its stated duration"
    try:
        for frame in container.decode(stream):
            for resampled in to_float.resample(frame):
                chunks.append(resampled.to_ndarray().mean(0)[:n_left])
                n_left -= len(chunks[-1])
            if n_left <= 0:
                break
    except av.FFmpegError as e:
        reason = one_line(e)
    return np.concatenate(chunks), reason

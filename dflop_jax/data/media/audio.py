"""Sound files to mono samples at one rate; lengths from the header alone.

PyAV reads every format that FFmpeg knows, so no other decoder is needed; scipy resamples.
"""

from __future__ import annotations

import logging
from fractions import Fraction
from functools import lru_cache
from math import ceil, gcd
from pathlib import Path

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import InputContainer

from dflop_jax.data.datasets.blob import Blob, open_media

# A windowed sinc of so many zero crossings on each side, flat up to PASSED of the lower Nyquist.
CROSSINGS, PASSED, KAISER_BETA = 64, 0.94, 9.0
logger = logging.getLogger("dflop_jax.data")


def count_samples(path: Path | Blob, rate_hz: int) -> int:
    """Samples of a sound once resampled to `rate_hz`, by the header (or, where that is silent, by
    its packets, undecoded). ValueError when the file is no sound, or holds none."""
    try:
        with open_media(path) as file, av.open(file, "r") as container:
            length_s = _length_s(container, _stream(container))
    except (av.FFmpegError, OSError, ValueError) as e:
        raise ValueError(f"{path}: not a readable sound ({_reason(e)})") from e
    if length_s <= 0:
        raise ValueError(f"{path}: not a readable sound (it holds no samples)")
    return ceil(length_s * rate_hz)


def read_sound(path: Path | Blob, n_samples: int, rate_hz: int) -> np.ndarray:
    """The first `n_samples` of a sound at `rate_hz`, float32 [n_samples] in -1..1.

    Channels are averaged. Where the sound breaks off, silence follows, with a warning. ValueError
    when more than half of the samples are missing that way.
    """
    reason = "it ends before its stated duration"
    parts: list[np.ndarray] = []
    try:
        with open_media(path) as file, av.open(file, "r") as container:
            stream = _stream(container)
            native_hz = stream.rate
            # what the resampling filter reaches beyond the last sample is decoded too
            wanted = ceil((n_samples + CROSSINGS + 1) * max(1.0, native_hz / rate_hz)) + CROSSINGS
            to_float = AudioResampler(format="fltp")
            n = 0
            try:
                for frame in container.decode(stream):
                    for part in to_float.resample(frame):
                        parts.append(part.to_ndarray().mean(0))
                        n += len(parts[-1])
                    if n >= wanted:
                        break
            except av.FFmpegError as e:
                reason = _reason(e)
    except (av.FFmpegError, OSError, ValueError) as e:
        raise ValueError(f"{path}: not a readable sound ({_reason(e)})") from e
    native = np.concatenate([np.zeros(0, np.float32), *parts])[:wanted]
    sound = resample(native, native_hz, rate_hz)[:n_samples]
    missing = n_samples - len(sound)
    if 2 * missing > n_samples or not len(sound):
        raise ValueError(f"{path}: only {len(sound)} of {n_samples} samples decode ({reason})")
    # headers of compressed sound may be off by a frame or two of the codec
    if missing > rate_hz // 10:
        logger.warning("%s: %d samples of silence put at the end (%s)", path, missing, reason)
    return np.pad(sound, (0, missing))


def resample(sound: np.ndarray, from_hz: int, to_hz: int) -> np.ndarray:
    """Band-limited resampling, float32 [ceil(n * to_hz / from_hz)]."""
    if from_hz == to_hz or not len(sound):
        return sound.astype(np.float32)
    from scipy import signal  # takes seconds to load, which most runs do not need

    common = gcd(from_hz, to_hz)
    up, down = to_hz // common, from_hz // common
    taps = _lowpass(max(up, down))
    return signal.resample_poly(sound.astype(np.float64), up, down, window=taps).astype(np.float32)


@lru_cache(maxsize=16)
def _lowpass(factor: int) -> np.ndarray:
    from scipy import signal

    return signal.firwin(
        2 * CROSSINGS * factor + 1, PASSED / factor, window=("kaiser", KAISER_BETA)
    )


def _stream(container: InputContainer) -> AudioStream:
    if not container.streams.audio:
        raise ValueError("it holds no audio stream")
    stream = container.streams.audio[0]
    if stream.rate < 1:
        raise ValueError("its sample rate is unknown")
    return stream


def _length_s(container: InputContainer, stream: AudioStream) -> Fraction:
    if stream.duration and stream.time_base:
        return stream.duration * stream.time_base
    if container.duration:
        return Fraction(container.duration, av.time_base)
    ticks = sum(packet.duration or 0 for packet in container.demux(stream))
    return ticks * (stream.time_base or Fraction(1, stream.rate))


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

"""Whisper's log-mel features as Qwen2-Audio uses them, and their token counts.

Audio at 16 kHz is cut or padded with silence to windows of 30 s. The encoder's convolution halves
the 3000 frames, a pooling halves them again, and the LLM sees those without padding. This is the
arithmetic of transformers' extractor in numpy, since importing that takes 3 s per decoder process.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any, ClassVar

import numpy as np

from dflop_jax.config import DataConfig
from dflop_jax.data.media.kind import AUDIO, Columns, Header, Kinds
from dflop_jax.data.media.medium import DecodedMedium, Facts, Form, MediaCounts, Medium
from dflop_jax.data.media.token_sources import copied_sources

POWER_FLOOR = 1e-10  # power below this counts as silence, as published
RANGE_LOG10 = 8.0  # features are clipped to this range below the loudest


@dataclass(frozen=True)
class MelSpec:
    """Settings of the feature extractor. Longer audio is cut to `max_windows` windows; the
    reference has 1."""

    sample_rate: int = 16000
    n_mels: int = 128
    n_fft: int = 400
    hop: int = 160
    window_s: float = 30
    max_windows: int = 1

    def __post_init__(self) -> None:
        if min(vars(self).values()) <= 0 or self.window_frames < 1:
            raise ValueError(f"{self}: every setting must be at least 1")

    @property
    def window_samples(self) -> int:
        return round(self.window_s * self.sample_rate)

    @property
    def window_frames(self) -> int:
        return self.window_samples // self.hop

    @property
    def max_samples(self) -> int:
        """Maximum number of samples used."""
        return self.max_windows * self.window_samples


def encoder_tokens(frames: np.ndarray) -> np.ndarray:
    """Return the LLM tokens of windows with `frames` valid mel frames, after conv and pooling."""
    after_conv = (np.asarray(frames, np.int64) - 1) // 2 + 1
    return np.maximum((after_conv - 2) // 2 + 1, 0)


def sound_counts(samples: np.ndarray, spec: MelSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (windows, valid mel frames, LLM tokens), int64 [n], of audio of int [n] samples."""
    samples = np.minimum(np.asarray(samples, np.int64), spec.max_samples)
    full, rest = np.divmod(samples, spec.window_samples)
    rest_frames = -(-rest // spec.hop)
    tokens = full * encoder_tokens(np.array(spec.window_frames)) + encoder_tokens(rest_frames)
    return full + (rest > 0), full * spec.window_frames + rest_frames, tokens


def log_mel(sound: np.ndarray, spec: MelSpec) -> np.ndarray:
    """Return float32 features [windows, n_mels, window_frames] of mono samples float32 [n]."""
    n = len(sound[: spec.max_samples])
    windows = -(-n // spec.window_samples)
    padded = np.zeros((windows, spec.window_samples), np.float32)
    padded.reshape(-1)[:n] = sound[:n]
    features = [_window_log_mel(w, spec) for w in padded]
    return np.array(features, np.float32).reshape(-1, spec.n_mels, spec.window_frames)


def _window_log_mel(sound: np.ndarray, spec: MelSpec) -> np.ndarray:
    padded = np.pad(sound, spec.n_fft // 2, mode="reflect").astype(np.float64)
    frames = np.lib.stride_tricks.sliding_window_view(padded, spec.n_fft)[:: spec.hop]
    frames = frames[: spec.window_frames]  # the reference drops the last one
    spectrum = np.fft.rfft(frames * np.hanning(spec.n_fft + 1)[:-1], axis=1)  # periodic
    power = (spectrum.real**2 + spectrum.imag**2) @ _mel_filters(spec)
    level = np.log10(np.maximum(power, POWER_FLOOR)).T
    level = np.maximum(level, level.max() - RANGE_LOG10)
    return ((level + 4.0) / 4.0).astype(np.float32)


def _mel_filters(spec: MelSpec) -> np.ndarray:
    """Return triangular filters of equal area [1 + n_fft // 2, n_mels] on Slaney's mel scale:
    linear up to 1000 Hz (15 mel), then 27 steps to each factor of 6.4."""
    nyquist_hz = spec.sample_rate / 2
    top_hz = min(nyquist_hz, 8000.0)
    top = top_hz * 3 / 200 if top_hz < 1000 else 15 + log(top_hz / 1000) * 27 / log(6.4)
    mels = np.linspace(0, top, spec.n_mels + 2)
    corners_hz = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp((mels - 15) * log(6.4) / 27))
    bins_hz = np.linspace(0, nyquist_hz, 1 + spec.n_fft // 2)
    low, mid, high = corners_hz[:-2], corners_hz[1:-1], corners_hz[2:]
    rising = (bins_hz[:, None] - low) / (mid - low)
    falling = (high - bins_hz[:, None]) / (high - mid)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


@dataclass(frozen=True)
class MelMedium(Medium):
    """Preparation of audio in windows. `window_tokens`: tokens of a window inside the encoder; 0:
    as many as its output features."""

    spec: MelSpec
    window_tokens: int = 0

    kinds: ClassVar[Kinds] = (AUDIO,)

    @property
    def features(self) -> int:
        """Features that the encoder outputs for a window."""
        return int(encoder_tokens(np.array(self.spec.window_frames)))

    @property
    def piece_tokens(self) -> int:  # type: ignore[override]
        return self.window_tokens or self.features

    def count(self, kind: str, headers: Columns, alone: np.ndarray) -> MediaCounts:
        windows, _, tokens = sound_counts(headers["samples"], self.spec)
        return MediaCounts(tokens > 0, windows, tokens)

    def cut(self, kind: str, headers: Columns) -> str:
        n = int((headers["samples"] > self.spec.max_samples).sum())
        seconds = self.spec.max_samples / self.spec.sample_rate
        message = f"audio longer than the {seconds:g} s that the model hears: {n:,}; split it"
        return message if n else ""

    def decode(self, kind: str, opened: Any, header: Header, alone: bool) -> DecodedMedium:
        spec = self.spec
        n = min(header["samples"], spec.max_samples)
        windows, frames, n_tokens = (int(count) for count in sound_counts(np.array(n), spec))
        full_then_rest = np.minimum(
            frames - np.arange(windows) * spec.window_frames, spec.window_frames
        )
        fields = {
            "mel": log_mel(opened(n, spec.sample_rate), spec),
            "mel_frames": full_then_rest.astype(np.int32),
        }
        lengths, tokens = (self.piece_tokens,) * windows, copied_sources(np.arange(n_tokens))
        return DecodedMedium(
            fields, lengths, windows * self.features, tokens, np.full(n_tokens, -1)
        )


def _build(facts: Facts, limits: DataConfig, tokenizer: object) -> MelMedium:
    settings = {name: value for name, value in facts.items() if name != "piece_tokens"}
    return MelMedium(MelSpec(**settings), int(facts.get("piece_tokens", 0)))


FORM = Form(MelMedium.kinds, _build)

"""Sizes of Qwen3-VL (dense), as in the published `config.json`; `nano` is for tests, `tiny` trains
on a CPU in minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from models.processors import SYMMETRIC, Processing
from models.sizes import DecoderSize, SizeFamily


@dataclass(frozen=True)
class NativeVisionSize:
    """A vision tower that takes pictures and pairs of frames at their own resolution.

    Attributes:
      frames: number of a clip's frames in one patch.
      merge: `merge` x `merge` neighbouring patches become one feature.
      side: learnt positions per side of the square that is resampled to a picture's grid.
      processing: from a folder's processors, or as published.
      deepstack: numbers of layers, from 0 and ascending, whose outputs feed the LLM.
    """

    width: int
    n_layers: int
    n_heads: int
    mlp: int
    deepstack: tuple[int, ...]
    patch_px: int = 16
    frames: int = 2
    merge: int = 2
    side: int = 48
    norm_eps: float = 1e-6
    processing: Processing = SYMMETRIC

    def __post_init__(self) -> None:
        if self.width % (4 * self.n_heads):
            raise ValueError(f"width / n_heads must be a multiple of 4: {self}")
        taps = self.deepstack
        if list(taps) != sorted(set(taps)) or not all(0 <= i < self.n_layers for i in taps):
            raise ValueError(
                f"deepstack_visual_indexes {list(taps)} must be ascending layers of the tower, "
                f"0 to {self.n_layers - 1}"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.n_heads

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: red, green and blue of every pixel of its frames."""
        return 3 * self.frames * self.patch_px**2

    @property
    def block(self) -> int:
        """Patches that become one feature."""
        return self.merge**2


@dataclass(frozen=True)
class Qwen3VLSize:
    """A tower at native resolution and a decoder with three positions per token."""

    decoder: DecoderSize
    vision: NativeVisionSize

    def __post_init__(self) -> None:
        if len(self.vision.deepstack) > self.decoder.n_layers:
            raise ValueError(
                f"{len(self.vision.deepstack)} layers of the tower feed the decoder's first layers,"
                f" but it has {self.decoder.n_layers}"
            )
        if not self.decoder.mrope_sections:
            raise ValueError(f"the decoder needs mrope_sections: {self.decoder}")


def _qwen3(
    width: int,
    n_layers: int,
    heads: tuple[int, int, int],
    mlp: int,
    vocab: int,
    sections: tuple[int, int, int],
    *,
    tied: bool,
    theta: float = 5e6,
) -> DecoderSize:
    """Return a decoder. `heads`: (n_heads, n_kv_heads, head_dim)."""
    n_heads, n_kv_heads, head_size = heads
    return DecoderSize(
        width, n_layers, n_heads, n_kv_heads, mlp, vocab, rope_theta=theta, qkv_bias=False,
        tied=tied, qk_norm=True, head_size=head_size, mrope_sections=sections,
    )  # fmt: skip


def _published(width: int, n_layers: int, n_heads: int, mlp: int, *, tied: bool) -> DecoderSize:
    heads = (n_heads, 8, 128)
    return _qwen3(width, n_layers, heads, mlp, 151936, (24, 20, 20), tied=tied)


_SMALLER = NativeVisionSize(1024, 24, 16, 4096, (5, 11, 17))
_LARGER = NativeVisionSize(1152, 27, 16, 4304, (8, 16, 24))

QWEN3_VL: Mapping[str, Qwen3VLSize] = {
    "qwen3-vl-nano": Qwen3VLSize(
        _qwen3(32, 4, (4, 2, 16), 96, 512, (4, 2, 2), tied=True, theta=1e4),
        NativeVisionSize(32, 3, 4, 64, (0, 1), patch_px=4, side=4),
    ),
    "qwen3-vl-tiny": Qwen3VLSize(
        _qwen3(128, 8, (4, 2, 32), 384, 512, (6, 5, 5), tied=True, theta=1e4),
        NativeVisionSize(64, 4, 4, 256, (0, 1, 2), patch_px=8, side=16),
    ),
    "qwen3-vl-2b": Qwen3VLSize(_published(2048, 28, 16, 6144, tied=True), _SMALLER),
    "qwen3-vl-4b": Qwen3VLSize(_published(2560, 36, 32, 9728, tied=True), _SMALLER),
    "qwen3-vl-8b": Qwen3VLSize(_published(4096, 36, 32, 12288, tied=False), _LARGER),
    "qwen3-vl-32b": Qwen3VLSize(_published(5120, 64, 64, 25600, tied=False), _LARGER),
}
QWEN3_VL_FAMILY = SizeFamily("qwen3_vl", QWEN3_VL, {})

"""Sizes of Qwen3.5 (dense), as in the published `config.json`; `nano` is for tests, `tiny` trains
on a CPU in minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.qwen3_vl_sizes import NativeVisionSize
from models.sizes import DecoderSize, SizeFamily

LINEAR, FULL = "linear", "full"  # kinds of layers
PERIOD = (LINEAR, LINEAR, LINEAR, FULL)


@dataclass(frozen=True)
class DeltaSize:
    """Heads of a gated delta net: `key_heads` of queries and keys; several `value_heads` share a
    key head; `taps` tokens are convolved."""

    key_heads: int
    value_heads: int
    key_size: int = 128
    value_size: int = 128
    taps: int = 4

    def __post_init__(self) -> None:
        if min(self.key_heads, self.taps) < 1 or self.value_heads % self.key_heads:
            raise ValueError(f"linear_num_key_heads must divide linear_num_value_heads: {self}")


@dataclass(frozen=True)
class HybridSize(DecoderSize):
    """A decoder whose layers mix tokens by gated delta nets or by gated attention.

    Attributes:
      kinds: LINEAR or FULL, by layer.
      rotary_size: the first coordinates of a head that are rotated by the token's position.
    """

    kinds: tuple[str, ...] = ()
    delta: DeltaSize = DeltaSize(16, 32)
    rotary_size: int = 64

    def __post_init__(self) -> None:
        if not 0 < self.rotary_size <= self.head_dim or self.rotary_size % 2:
            raise ValueError(
                f"partial_rotary_factor must rotate an even number of a head's {self.head_dim} "
                f"coordinates, not {self.rotary_size}"
            )
        super().__post_init__()
        if len(self.kinds) != self.n_layers or set(self.kinds) - {LINEAR, FULL}:
            raise ValueError(
                f"layer_types must have linear_attention or full_attention for each of the "
                f"{self.n_layers} layers"
            )

    @property
    def rotary_pairs(self) -> int:
        return self.rotary_size // 2

    @property
    def norm_offset(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Qwen35Size:
    """Perhaps a tower at native resolution, and a decoder with three positions per token."""

    decoder: HybridSize
    vision: NativeVisionSize | None = None

    def __post_init__(self) -> None:
        if self.vision and self.vision.deepstack:
            raise ValueError(f"no layer of Qwen3.5's tower feeds the decoder's layers: {self}")


def _decoder(width: int, n_layers: int, mlp: int, *, tied: bool, **overrides: Any) -> HybridSize:
    """Return a published decoder with `overrides`."""
    published: dict[str, Any] = {
        "n_heads": 16,
        "n_kv_heads": 4,
        "head_size": 256,
        "vocab": 248320,
        "rope_theta": 1e7,
        "mrope_sections": (11, 11, 10),
        "rotary_size": 64,
    }
    kinds = tuple(PERIOD[i % len(PERIOD)] for i in range(n_layers))
    layer_sizes = {"width": width, "n_layers": n_layers, "mlp": mlp, "tied": tied, "kinds": kinds}
    return HybridSize(
        **{**published, "qkv_bias": False, "qk_norm": True, **layer_sizes, **overrides}
    )


_SMALLER = NativeVisionSize(1024, 24, 16, 4096, ())
_LARGER = NativeVisionSize(1152, 27, 16, 4304, ())
_SMALL: Mapping[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "vocab": 512, "rope_theta": 1e4}
_NANO = {
    **_SMALL,
    "head_size": 16,
    "delta": DeltaSize(2, 4, 16, 16),
    "mrope_sections": (2, 1, 1),
    "rotary_size": 8,
}
_TINY = {
    **_SMALL,
    "head_size": 64,
    "delta": DeltaSize(4, 8, 16, 16),
    "mrope_sections": (4, 2, 2),
    "rotary_size": 16,
}

QWEN3_5: Mapping[str, Qwen35Size] = {
    "qwen3.5-nano": Qwen35Size(
        _decoder(32, 4, 96, tied=True, **_NANO),
        NativeVisionSize(32, 2, 4, 64, (), patch_px=4, side=4),
    ),
    "qwen3.5-tiny": Qwen35Size(
        _decoder(128, 8, 384, tied=True, **_TINY),
        NativeVisionSize(64, 4, 4, 256, (), patch_px=8, side=16),
    ),
    "qwen3.5-4b": Qwen35Size(_decoder(2560, 32, 9216, tied=True), _SMALLER),
    "qwen3.5-9b": Qwen35Size(_decoder(4096, 32, 12288, tied=False), _LARGER),
}
QWEN3_5_TEXT: Mapping[str, Qwen35Size] = {
    name.replace("qwen3.5", "qwen3.5-text"): Qwen35Size(size.decoder)
    for name, size in QWEN3_5.items()
}
QWEN3_5_FAMILY = SizeFamily("qwen3_5", QWEN3_5, {})
QWEN3_5_TEXT_FAMILY = SizeFamily("qwen3_5_text", QWEN3_5_TEXT, {})

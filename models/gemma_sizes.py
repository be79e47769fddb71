"""Sizes of Gemma 3 (arXiv 2503.19786) and of Gemma 4 without experts, per-layer embeddings or
audio; `nano` is for tests, `tiny` trains on a CPU in minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.processors import SYMMETRIC, Processing
from models.sizes import SizeFamily, VisionSize

SLIDING, GLOBAL = "sliding", "global"  # kinds of layers


@dataclass(frozen=True)
class HeadsSize:
    """Attention heads of the layers of a kind.

    Attributes:
      theta: base of the rotary wavelengths; the first `rotated_pairs` pairs of a head are rotated
        (None: all), by positions divided by `position_factor`.
      scale: factor of the products of queries and keys.
      window: how many tokens back a token attends, 0: all.
      values_are_keys: whether values are the keys before norm and rotation.
      bidirectional_images: whether the tokens of a picture attend to each other, in the window.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    theta: float
    scale: float
    window: int = 0
    rotated_pairs: int | None = None
    position_factor: float = 1.0
    values_are_keys: bool = False
    bidirectional_images: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.n_heads % self.n_kv_heads:
            raise ValueError(f"head_dim must be even and n_kv_heads must divide n_heads: {self}")
        if self.window < 0 or self.scale <= 0 or self.position_factor <= 0:
            raise ValueError(f"window must be >= 0, scale and position_factor > 0: {self}")


@dataclass(frozen=True)
class GemmaSize:
    """A decoder whose layers are of the kinds "sliding" and "global", in any order.

    Attributes:
      kinds: of every layer.
      norm_offset: added to the learnt scale of every norm except that of values.
      value_norm: whether values are normed, without a learnt scale.
      layer_scalar: whether a layer's output is multiplied by an untrained number.
      cap: bound of the logits, see `models.loss.head_logits`.
    """

    width: int
    mlp: int
    vocab: int
    kinds: tuple[str, ...]
    sliding_heads: HeadsSize
    global_heads: HeadsSize
    norm_eps: float = 1e-6
    norm_offset: float = 1.0
    value_norm: bool = False
    layer_scalar: bool = False
    cap: float = 0.0
    tied: bool = True
    logits_elements: int = 2**28
    mrope_sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= {SLIDING, GLOBAL}:
            raise ValueError(f"kinds must be {SLIDING} or {GLOBAL}, at least one: {self.kinds}")

    @property
    def n_layers(self) -> int:
        return len(self.kinds)

    def heads(self, kind: str) -> HeadsSize:
        """Return the heads of the layers of a kind."""
        return self.sliding_heads if kind == SLIDING else self.global_heads


def layer_pattern(n_layers: int, period: int) -> tuple[str, ...]:
    """Return kinds of layers in which every `period`-th is global."""
    return tuple(GLOBAL if (i + 1) % period == 0 else SLIDING for i in range(n_layers))


@dataclass(frozen=True)
class Gemma3Size:
    """A decoder and perhaps a SigLIP tower, with `vision.merge` squared patches per token."""

    decoder: GemmaSize
    vision: VisionSize | None = None


def _gemma3(
    width: int, mlp: int, n_layers: int, heads: tuple[int, int, int], window: int, **more: float
) -> GemmaSize:
    """Return a decoder. `heads`: (n_heads, n_kv_heads, head_dim). `more`: `scalar`, which is
    scale^-2; `factor` of global layers' positions; `vocab`."""
    scale = (more.get("scalar", heads[2])) ** -0.5
    sliding_heads = HeadsSize(
        *heads, theta=1e4, scale=scale, window=window, bidirectional_images=True
    )
    global_heads = replace(
        sliding_heads, theta=1e6, window=0, position_factor=more.get("factor", 8.0)
    )
    kinds = layer_pattern(n_layers, int(more.get("period", 6)))
    vocab = int(more.get("vocab", 262208))
    return GemmaSize(width, mlp, vocab, kinds, sliding_heads, global_heads)


_SIGLIP = VisionSize(896, 14, 1152, 27, 16, 4304, merge=4)
_NANO = VisionSize(32, 4, 32, 2, 4, 64, merge=2)
_TINY = VisionSize(48, 8, 64, 4, 4, 256, merge=2)

GEMMA3: Mapping[str, Gemma3Size] = {
    "gemma3-nano": Gemma3Size(_gemma3(32, 96, 4, (4, 2, 16), 8, period=3, vocab=512), _NANO),
    "gemma3-tiny": Gemma3Size(_gemma3(128, 384, 6, (4, 2, 32), 64, vocab=512), _TINY),
    "gemma3-4b": Gemma3Size(_gemma3(2560, 10240, 34, (8, 4, 256), 1024), _SIGLIP),
    "gemma3-12b": Gemma3Size(_gemma3(3840, 15360, 48, (16, 8, 256), 1024), _SIGLIP),
    "gemma3-27b": Gemma3Size(_gemma3(5376, 21504, 62, (32, 16, 128), 1024, scalar=168), _SIGLIP),
}
GEMMA3_TEXT: Mapping[str, Gemma3Size] = {
    "gemma3-text-nano": Gemma3Size(GEMMA3["gemma3-nano"].decoder),
    "gemma3-1b": Gemma3Size(_gemma3(1152, 6912, 26, (4, 1, 256), 512, factor=1.0, vocab=262144)),
}
GEMMA3_FAMILY = SizeFamily("gemma3", GEMMA3, {})
GEMMA3_TEXT_FAMILY = SizeFamily("gemma3_text", GEMMA3_TEXT, {})


# ---- Gemma 4 ----


@dataclass(frozen=True)
class Gemma4VisionSize:
    """A tower that takes pictures and frames at their own aspect ratio.

    Attributes:
      side: number of learnt row positions, and of column positions.
      merge: `merge` squared neighbouring patches are averaged to one token.
      clipped: whether inputs and outputs of a layer's matrices are clipped at fixed bounds.
      standardized: whether tokens are shifted and scaled by fixed numbers.
      soft_tokens, frame_tokens: limits for a picture and for a frame of a clip, as published.
      processing: from a folder's processors, or as published.
    """

    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    mlp: int
    patch_px: int = 16
    merge: int = 3
    side: int = 10240
    theta: float = 100.0
    norm_eps: float = 1e-6
    clipped: bool = False
    standardized: bool = False
    soft_tokens: int = 280
    frame_tokens: int = 70
    processing: Processing = SYMMETRIC

    def __post_init__(self) -> None:
        if self.head_dim % 4 or self.n_heads % self.n_kv_heads:
            raise ValueError(f"4 must divide head_dim, and n_kv_heads must divide n_heads: {self}")

    @property
    def patch_values(self) -> int:
        """Numbers of a patch: red, green and blue of every pixel."""
        return 3 * self.patch_px**2

    @property
    def block(self) -> int:
        """Patches that become one token."""
        return self.merge**2


@dataclass(frozen=True)
class Gemma4Size:
    """A decoder and, except for text alone, a tower."""

    decoder: GemmaSize
    vision: Gemma4VisionSize | None = None


def _gemma4(
    width: int,
    mlp: int,
    kinds: tuple[str, ...],
    heads: tuple[int, int, int],
    global_kv_heads: tuple[int, int],
    window: int,
    vocab: int = 262144,
) -> GemmaSize:
    """Return a decoder. `heads`: (n_heads, n_kv_heads, head_dim); `global_kv_heads`: (kv, dim)."""
    sliding_heads = HeadsSize(
        *heads, theta=1e4, scale=1.0, window=window, bidirectional_images=True
    )
    n_kv_heads, head_dim = global_kv_heads
    global_heads = HeadsSize(
        heads[0], n_kv_heads, head_dim, theta=1e6, scale=1.0, rotated_pairs=head_dim // 8,
        values_are_keys=True,
    )  # fmt: skip
    return GemmaSize(
        width, mlp, vocab, kinds, sliding_heads, global_heads, norm_offset=0.0, value_norm=True,
        layer_scalar=True, cap=30.0,
    )  # fmt: skip


GEMMA4: Mapping[str, Gemma4Size] = {
    "gemma4-nano": Gemma4Size(
        _gemma4(32, 96, layer_pattern(4, 2), (4, 2, 16), (1, 32), 8, 512),
        Gemma4VisionSize(32, 2, 4, 4, 8, 64, patch_px=4, side=64, clipped=True, standardized=True),
    ),
    "gemma4-tiny": Gemma4Size(
        _gemma4(128, 384, layer_pattern(6, 6), (4, 2, 32), (1, 64), 64, 512),
        Gemma4VisionSize(64, 4, 4, 4, 16, 256, patch_px=8, side=64, standardized=True),
    ),
    "gemma4-31b": Gemma4Size(
        _gemma4(5376, 21504, layer_pattern(60, 6), (32, 16, 256), (4, 512), 1024),
        Gemma4VisionSize(1152, 27, 16, 16, 72, 4304, standardized=True),
    ),
}
GEMMA4_TEXT: Mapping[str, Gemma4Size] = {
    "gemma4-text-nano": Gemma4Size(GEMMA4["gemma4-nano"].decoder),
}
GEMMA4_FAMILY = SizeFamily("gemma4", GEMMA4, {})
GEMMA4_TEXT_FAMILY = SizeFamily("gemma4_text", GEMMA4_TEXT, {})

"""Sizes of Gemma 3 (arXiv 2503.19786) and of Gemma 4 without experts, per-layer embeddings or
sound; `nano` is for tests, `tiny` trains on a CPU in minutes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.sizes import SizeFamily, VisionSize

SLIDING, GLOBAL = "sliding", "global"  # kinds of layers


@dataclass(frozen=True)
class HeadsSize:
    """Attention of the layers of a kind.

    Attributes:
      theta: base of the rotary positions' wavelengths; the first `turned` pairs of a head turn
        (None: all), as if at positions divided by `factor`.
      scale: of the products of queries and keys.
      window: tokens that one sees at most, 0: all before it.
      values_are_keys: values are the keys' products, before these are normed and turned.
      pictures: whether the tokens of a picture all see each other, within the window behind them.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    theta: float
    scale: float
    window: int = 0
    turned: int | None = None
    factor: float = 1.0
    values_are_keys: bool = False
    pictures: bool = False

    def __post_init__(self) -> None:
        if self.head_dim % 2 or self.n_heads % self.n_kv_heads:
            raise ValueError(f"heads must be even and kv heads divide the heads: {self}")
        if self.window < 0 or self.scale <= 0 or self.factor <= 0:
            raise ValueError(f"a window is no number below 0, scale and factor are above: {self}")


@dataclass(frozen=True)
class GemmaSize:
    """A decoder whose layers are of the kinds "sliding" and "global", in any order.

    Attributes:
      kinds: of every layer.
      around: what is added to the learnt scale of every norm but those of values.
      value_norm: whether values are normed, by a norm without a scale.
      layer_scalar: whether a layer's output is multiplied by a number that is not trained.
      cap: of the logits, see `models.loss.head_logits`.
    """

    width: int
    mlp: int
    vocab: int
    kinds: tuple[str, ...]
    sliding: HeadsSize
    whole: HeadsSize
    norm_eps: float = 1e-6
    around: float = 1.0
    value_norm: bool = False
    layer_scalar: bool = False
    cap: float = 0.0
    tied: bool = True
    logits_elements: int = 2**27
    mrope_sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= {SLIDING, GLOBAL}:
            raise ValueError(f"layers are {SLIDING} or {GLOBAL}, one at least: {self.kinds}")

    @property
    def n_layers(self) -> int:
        return len(self.kinds)

    def heads(self, kind: str) -> HeadsSize:
        """Of the layers of a kind."""
        return self.sliding if kind == SLIDING else self.whole


def pattern(n_layers: int, period: int) -> tuple[str, ...]:
    """Kinds of layers of which every `period`-th is global."""
    return tuple(GLOBAL if (i + 1) % period == 0 else SLIDING for i in range(n_layers))


@dataclass(frozen=True)
class Gemma3Size:
    """A decoder and, but for text alone, a SigLIP tower: the mean of `vision.merge` squared patches
    is a token."""

    decoder: GemmaSize
    vision: VisionSize | None = None


def _gemma3(
    width: int, mlp: int, n_layers: int, heads: tuple[int, int, int], window: int, **more: float
) -> GemmaSize:
    """`heads`: of queries, of keys and values, and how large. Further: `scalar`, the square of one
    over the scale; `factor` of global layers' positions; `vocab`."""
    scale = (more.get("scalar", heads[2])) ** -0.5
    sliding = HeadsSize(*heads, theta=1e4, scale=scale, window=window, pictures=True)
    whole = replace(sliding, theta=1e6, window=0, factor=more.get("factor", 8.0))
    vocab = int(more.get("vocab", 262208))
    return GemmaSize(
        width, mlp, vocab, pattern(n_layers, int(more.get("period", 6))), sliding, whole
    )


def without_pictures(size: GemmaSize) -> GemmaSize:
    """The same for text alone."""
    heads = {name: replace(getattr(size, name), pictures=False) for name in ("sliding", "whole")}
    return replace(size, **heads)


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
    "gemma3-text-nano": Gemma3Size(without_pictures(GEMMA3["gemma3-nano"].decoder)),
    "gemma3-1b": Gemma3Size(
        without_pictures(_gemma3(1152, 6912, 26, (4, 1, 256), 512, factor=1.0, vocab=262144))
    ),
}
GEMMA3_FAMILY = SizeFamily("gemma3", GEMMA3, {})
GEMMA3_TEXT_FAMILY = SizeFamily("gemma3_text", GEMMA3_TEXT, {})

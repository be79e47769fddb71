"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + (alpha / rank) (x A) B, W staying fixed.

B begins at zero, so an adapted model begins as the model that it adapts. A and B of a layer are the
module's part "adapter"; `merge` folds them into the weights for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclass(frozen=True)
class Lora:
    """Rank of the adapters, and the strength at which they act."""

    rank: int
    alpha: float

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < float("inf"):
            raise ValueError(f"LoRA needs a rank of at least 1 and an alpha above 0, got {self}")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def merge(lora: Lora, params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of the plain model that computes what the adapted one does.

    Args:
      lora: of the module that the parameters belong to.
      params: its parts, or those of a segment of it, with stacked "layers" and their "adapter"; on
        the host or on devices, where the result then is too.

    Returns:
      The same parts without "adapter"; as they are where there is none.
    """
    plain = {part: tree for part, tree in params.items() if part != "adapter"}
    adapter = params.get("adapter", {})
    layers = dict(plain.get("layers", {}))
    for name, pair in adapter.items():
        kernel = _folded(layers[name]["kernel"], pair["a"], pair["b"], lora.scale)
        layers[name] = {**layers[name], "kernel": kernel}
    return {**plain, "layers": layers} if adapter else plain


@partial(jax.jit, static_argnums=3)
def _folded(kernels: Array, a: Array, b: Array, scale: float) -> Array:
    product = jax.vmap(partial(jnp.tensordot, axes=1, precision="highest"))
    return kernels.astype(a.dtype) + scale * product(a, b)

"""Products of layers in FP8, by qwix.

Operands are rounded to 8-bit floats with one scale per tensor and device, its largest value:
activations and weights to e4m3, gradients to e5m2 (arXiv 2209.05433). Sums, stored weights,
adapters, attention, and both ends of a module keep their dtype. A scale covers what a data rank
computes at once, so losses depend on the plan by more than rounding of `model.dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from models.layers import Linear

Array = jax.Array


@dataclass(frozen=True)
class Fp8Module:
    """A module of the contract whose layers compute the product of each `Linear` in FP8."""

    module: Any

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.module, name)

    def on_chip(self, chip: str) -> Fp8Module:
        return replace(self, module=self.module.on_chip(chip))

    def layer(
        self, params: Any, x: Array, batch: Mapping[str, Array], *args: Any, **kwargs: Any
    ) -> Array:
        with nn.intercept_methods(_replace_product):
            return self.module.layer(params, x, batch, *args, **kwargs)


def _replace_product(next_call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
    """Run a method of a Linen module; `Linear.product` in FP8."""
    if not isinstance(context.module, Linear) or context.method_name != "product":
        return next_call(*args, **kwargs)
    return fp8_product(len(context.module.in_shape)).apply({}, *args)


class _Product(nn.Module):
    n_in: int

    def __call__(self, x: Array, kernel: Array) -> Array:
        return jnp.tensordot(x, kernel, axes=self.n_in)


@cache
def fp8_product(n_in: int) -> nn.Module:
    """Return the module that multiplies x [..., *in] and a kernel [*in, *out] with `n_in` input
    dims; ValueError without qwix."""
    try:
        import qwix
    except ImportError as e:
        raise ValueError(f"model.matmul=fp8 needs qwix ({e}): pip install -e '.[fp8]'") from None
    rule = qwix.QtRule(
        weight_qtype=jnp.float8_e4m3fn,
        act_qtype=jnp.float8_e4m3fn,
        bwd_qtype=jnp.float8_e5m2,
        disable_channelwise_axes=True,
    )
    return qwix.quantize_model(_Product(n_in), qwix.QtProvider([rule]))

"""Linear and norm layers, whose parameters carry logical axis names.

Parameters are made in float32; a layer casts its inputs to its compute `dtype`. Axis names are Flax
metadata boxes around the parameters: `axis_names` reads them, `init_values` strips them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import pi, prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

Array = jax.Array
Names = tuple[str | None, ...]
KERNEL = "kernel"  # of a matrix
NORM_EPS = 1e-6  # of queries and keys, as published


def named_init(init: Callable[..., Array], *names: str | None) -> Callable[..., Any]:
    """Return an initialiser whose array carries one logical axis name per dim."""
    return nn.with_partitioning(init, names)


def normal(std: float) -> Callable[..., Array]:
    """Return a normal initialiser truncated at two standard deviations."""
    return nn.initializers.truncated_normal(stddev=std)


def untrained_param(module: nn.Module, name: str, shape: tuple[int, ...], value: float) -> Array:
    """Make a float32 parameter that is not trained; reference models call it a buffer. Its module
    lists it in `float32_names`."""
    init = named_init(nn.initializers.constant(value), *(None,) * len(shape))
    return jax.lax.stop_gradient(module.param(name, init, shape, jnp.float32))


def _is_box(x: Any) -> bool:
    return isinstance(x, nn.Partitioned)


def init_values(module: nn.Module, key: Array, *args: Any) -> Any:
    """Return float32 parameters of `module`; `args` are example inputs or ShapeDtypeStructs."""
    boxes = module.lazy_init(key, *args)["params"]
    return jax.tree.map(lambda box: box.value, boxes, is_leaf=_is_box)


def axis_names(module: nn.Module, *args: Any) -> Any:
    """Return the tree of `init_values` with a tuple of logical axis names per array."""
    boxes = jax.eval_shape(module.lazy_init, jax.random.key(0), *args)["params"]
    return jax.tree.map(lambda box: box.names, boxes, is_leaf=_is_box)


def apply(module: nn.Module, params: Any, *args: Any) -> Any:
    """Run `module` with the parameters of `init_values`."""
    return module.apply({"params": params}, *args)


class Linear(nn.Module):
    """x [..., *in_shape] times a kernel, plus an optional bias; `models.lora` adapts it."""

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    in_names: Names
    out_names: Names
    dtype: jnp.dtype
    bias: bool = False
    std: float | None = None  # None: 1 / sqrt(fan in)

    @nn.compact
    def __call__(self, x: Array) -> Array:
        std = prod(self.in_shape) ** -0.5 if self.std is None else self.std
        init = named_init(normal(std), *self.in_names, *self.out_names)
        kernel = self.param(KERNEL, init, (*self.in_shape, *self.out_shape), jnp.float32)
        y = self.product(x, kernel.astype(self.dtype))
        if self.bias:
            zeros = named_init(nn.initializers.zeros, *self.out_names)
            bias = self.param("bias", zeros, self.out_shape, jnp.float32).astype(self.dtype)
            flat = y.reshape(*y.shape[: y.ndim - bias.ndim], bias.size)  # cuBLAS adds a vector
            y = (flat + _expand_leading(bias.reshape(-1), flat)).reshape(y.shape)
        return y

    def product(self, x: Array, kernel: Array) -> Array:
        """Return x times the kernel; `models.fp8` replaces it."""
        return jnp.tensordot(x, kernel, axes=len(self.in_shape))


@jax.custom_jvp
def exact_gelu(x: Array) -> Array:
    """Compute x times the normal distribution function of x, in float32.

    jax 0.12.0's own uses an `erfc` that `shard_map` rejects.
    """
    x32 = x.astype(jnp.float32)
    return (x32 * _normal_cdf(x32)).astype(x.dtype)


@exact_gelu.defjvp
def _exact_gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    x32 = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * x32 * x32) * (2.0 * pi) ** -0.5
    slope = _normal_cdf(x32) + x32 * density
    return exact_gelu(x), slope.astype(x.dtype) * dx


def _normal_cdf(x: Array) -> Array:
    return 0.5 * (1.0 + jax.lax.erf(x * 0.5**0.5))


@jax.custom_jvp
def tanh_gelu(x: Array) -> Array:
    """Compute `exact_gelu` with the distribution function approximated by tanh.

    Written as XLA knows it, which then lets cuBLAS compute it after a product.
    """
    return x * (0.5 * (1.0 + jnp.tanh((2.0 / pi) ** 0.5 * (x + 0.044715 * (x * (x * x))))))


@tanh_gelu.defjvp
def _tanh_gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Written with a logistic function, which XLA computes again where it is read; it would store
    tanh."""
    (x,), (dx,) = primals, tangents
    return tanh_gelu(x), jax.jvp(_logistic_gelu, (x,), (dx,))[1]


def _logistic_gelu(x: Array) -> Array:
    return x * jax.nn.sigmoid((8.0 / pi) ** 0.5 * (x + 0.044715 * x**3))


def _expand_leading(last: Array, x: Array) -> Array:
    return jnp.expand_dims(last, tuple(range(x.ndim - last.ndim)))


class LayerScale(nn.Module):
    """x times a learned scale per feature."""

    initial: float = 0.1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = named_init(nn.initializers.constant(self.initial), "embed")
        scale = self.param("scale", init, (x.shape[-1],), jnp.float32)
        return x * _expand_leading(scale.astype(x.dtype), x)


class RMSNorm(nn.Module):
    """x over its root mean square along the last dims, in float32, times a scale.

    `names` are the logical axes of the dims that are normed together. The scale is `offset` plus a
    learnt parameter, initially one in all; without `scaled` it is always one.
    """

    eps: float
    names: Names = ("embed",)
    offset: float = 0.0
    scaled: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        n = len(self.names)
        x32 = x.astype(jnp.float32)
        axes = tuple(range(-n, 0))
        y = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + self.eps)
        if not self.scaled:
            return y.astype(x.dtype)
        init = named_init(nn.initializers.constant(1.0 - self.offset), *self.names)
        scale = self.param("scale", init, x.shape[-n:], jnp.float32).astype(y.dtype)
        if self.offset:
            scale = scale + self.offset
        return (y * _expand_leading(scale, y)).astype(x.dtype)


class LayerNorm(nn.Module):
    """x with mean 0 and variance 1 along the last dim, in float32, times a scale plus a bias."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        ones = named_init(nn.initializers.ones, "embed")
        zeros = named_init(nn.initializers.zeros, "embed")
        scale = self.param("scale", ones, (x.shape[-1],), jnp.float32)
        bias = self.param("bias", zeros, (x.shape[-1],), jnp.float32)
        x32 = x.astype(jnp.float32)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps)
        scale, bias = scale.astype(y.dtype), bias.astype(y.dtype)
        return (y * _expand_leading(scale, y) + _expand_leading(bias, y)).astype(x.dtype)

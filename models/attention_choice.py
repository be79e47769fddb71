"""Chooses an attention kernel by chip, dtype and shape."""

from __future__ import annotations

import math

import jax.numpy as jnp

from models import attention_cudnn, attention_gpu

KERNELS = ("auto", "cudnn", "pallas", "xla")
MIN_KERNEL_TOKENS = attention_gpu.BLOCK  # shorter rows do not fill a block

# Compute capabilities: the kernels need Ampere's tensor cores; jax lets cuDNN pack rows from Hopper
# on, except on consumer Blackwell; larger heads need Hopper's registers.
_AMPERE, _HOPPER, _AFTER_BLACKWELL = 80, 90, 120
# Limit of the workspace of cuDNN's deterministic backward: before cuDNN 9.25 it stores a
# half-precision score for each pair of tokens, which is too much for packed rows.
_MAX_WORKSPACE_BYTES = 2 * 2**30


def check_kernel(name: str) -> str:
    """Return the name of an attention kernel; ValueError if it is unknown."""
    if name not in KERNELS:
        raise ValueError(f"unknown attention kernel {name!r}; known: {', '.join(KERNELS)}")
    return name


def is_gpu(chip: str) -> bool:
    """Return whether a chip can run the GPU kernels."""
    return chip.startswith("sm_")


def choose_kernel(
    kernel: str,
    chip: str,
    dtype: jnp.dtype,
    shape: tuple[int, ...],
    *,
    is_packed: bool,
    window: int = 0,
    has_last_visible: bool = False,
) -> str:
    """Return the kernel, "cudnn", "pallas" or "xla", that computes a case on a chip.

    Args:
      kernel: the model's choice: see `models.attention.attention`.
      chip: "sm_90" and the like; anything else without a GPU.
      dtype: of queries, keys and values.
      shape: of the queries [items, tokens, heads, head_dim].
      is_packed: whether rows hold several segments, or padding.
      window: of causal attention, 0: none. has_last_visible: whether tokens see later ones. cuDNN's
        kernels support neither.
    """
    items, tokens, heads, head_dim = shape
    if kernel in ("xla", "pallas"):
        return kernel
    if not skips(kernel, chip, dtype, head_dim, tokens):
        return "xla"
    capability = int(chip.removeprefix("sm_"))
    fits = attention_cudnn.AVAILABLE and head_dim % 8 == 0 and not (window or has_last_visible)
    fits &= head_dim <= (256 if capability >= _HOPPER else 128)
    if is_packed:
        fits &= kernel == "cudnn" and _HOPPER <= capability < _AFTER_BLACKWELL
        fits &= math.prod(shape) <= attention_cudnn.MAX_ELEMENTS
    elif kernel == "auto":
        fits &= 2 * items * heads * tokens**2 <= _MAX_WORKSPACE_BYTES
    return "cudnn" if fits else "pallas"


def skips(
    kernel: str, chip: str, dtype: jnp.dtype, head_dim: int, tokens: int = MIN_KERNEL_TOKENS
) -> bool:
    """Return whether the chosen kernel skips tokens of other segments, in rows of `tokens`."""
    if kernel in ("xla", "pallas"):
        return kernel == "pallas"
    fits = dtype in (jnp.bfloat16, jnp.float16) and tokens >= MIN_KERNEL_TOKENS
    fits &= head_dim <= attention_gpu.MAX_HEAD_DIM
    return fits and is_gpu(chip) and int(chip.removeprefix("sm_")) >= _AMPERE

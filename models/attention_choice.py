"""Chooses an attention kernel by chip, dtype and shape."""

from __future__ import annotations

import jax.numpy as jnp

from models import attention_cudnn, attention_gpu, attention_tokamax

KERNELS = ("auto", "cudnn", "pallas", "xla")
MIN_KERNEL_TOKENS = attention_gpu.BLOCK  # shorter rows do not fill a block

_AMPERE = 80  # compute capability of the oldest tensor cores that the kernels use
_MAX_CUDNN_HEAD_DIM = 128  # larger heads need Hopper


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
    """Return the kernel that computes a case on a chip: "xla"; "pallas": the project's; "cudnn";
    "cudnn_forward", "tokamax_forward": forward by a library, backward by the project's kernels.

    Args:
      kernel: the model's choice: see `models.attention.attention`.
      chip: "sm_90" and the like; anything else without a GPU.
      dtype: of queries, keys and values.
      shape: of the queries [items, tokens, heads, head_dim].
      is_packed: whether rows hold several segments, or padding.
      window: of causal attention, 0: none. has_last_visible: whether tokens see later ones. cuDNN
        supports neither.
    """
    _, tokens, _, head_dim = shape
    if kernel in ("xla", "pallas"):
        return kernel
    if not skips(kernel, chip, dtype, head_dim, tokens):
        return "xla"
    if is_packed:
        fits = chip == attention_tokamax.CHIP and head_dim <= attention_tokamax.MAX_HEAD_DIM
        return "tokamax_forward" if fits and attention_tokamax.is_available() else "pallas"
    fits = not (window or has_last_visible) and head_dim % 8 == 0
    if not fits or head_dim > _MAX_CUDNN_HEAD_DIM or not attention_cudnn.is_available():
        return "pallas"
    return "cudnn" if kernel == "cudnn" else "cudnn_forward"


def skips(
    kernel: str, chip: str, dtype: jnp.dtype, head_dim: int, tokens: int = MIN_KERNEL_TOKENS
) -> bool:
    """Return whether the chosen kernel skips tokens of other segments, in rows of `tokens`."""
    if kernel in ("xla", "pallas"):
        return kernel == "pallas"
    fits = dtype in (jnp.bfloat16, jnp.float16) and tokens >= MIN_KERNEL_TOKENS
    fits &= head_dim <= attention_gpu.MAX_HEAD_DIM
    return fits and is_gpu(chip) and int(chip.removeprefix("sm_")) >= _AMPERE

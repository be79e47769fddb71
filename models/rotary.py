"""Rotary positions (arXiv 2104.09864): the two halves of a head hold the two coordinates of its
pairs, and each pair is rotated by an angle that grows with the token's position.

Angles are float32 [items, tokens, half], where `half` is half of a head's size.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
WAVELENGTH_BASE = 1e4  # of picture grids and diffusion times


def rotate(x: Array, angles: Array) -> Array:
    """Rotate the first pairs of heads [items, tokens, heads, head_dim] by their tokens' angles."""
    turned = 2 * angles.shape[-1]
    if turned < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :turned], angles), x[..., turned:]], axis=-1)
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def angles_of(
    positions: Array,
    half: int,
    theta: float,
    sections: tuple[int, ...] = (),
    *,
    turned: int | None = None,
    factor: float = 1.0,
) -> Array:
    """Return angles of text, or of text and pictures.

    Args:
      positions: int [items, tokens], or [items, tokens, 3] with `sections`: time, row, column.
      theta: base of the wavelengths.
      sections: numbers of pairs that are rotated by time, row and column ("interleaved M-RoPE",
        arXiv 2511.21631): time, row and column take turns until their numbers are used up; the
        remaining pairs use time.
      turned: number of first pairs that are rotated; the others are not. None: all are.
      factor: divisor of positions ("linear" scaling to longer texts).
    """
    # On the host, in the reference's steps: far from the start, a frequency's last bit matters.
    exponents = np.arange(half, dtype=np.float32) / np.float32(half)
    frequencies = np.float32(1.0) / np.float32(theta) ** exponents
    if turned is not None:
        frequencies[turned:] = 0.0
    frequencies = frequencies / np.float32(factor)
    if not sections:
        return positions.astype(jnp.float32)[:, :, None] * frequencies[None, None]
    axis = np.zeros((1, 1, half), np.int32)
    for i in (1, 2):
        axis[..., i : 3 * sections[i] : 3] = i
    time, row, column = (positions[..., i : i + 1] for i in range(3))
    turned_by = jnp.where(axis == 1, row, jnp.where(axis == 2, column, time))
    return turned_by.astype(jnp.float32) * frequencies[None, None]


def grid_angles(grid: Array, half: int) -> Array:
    """Return angles of patches: half of the pairs rotate by the row, half by the column.

    Args:
      grid: int [items, tokens, 2 or more], row and column first.
    """
    row, column = grid[..., 0], grid[..., 1]
    return jnp.concatenate(
        [angles_of(axis, half // 2, WAVELENGTH_BASE) for axis in (row, column)], axis=-1
    )

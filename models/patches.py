"""Cutting tiles into patches."""

from __future__ import annotations

import jax

Array = jax.Array


def patchify(pixels: Array, patch_px: int) -> Array:
    """[items, px, px, channels] -> [items, patches, patch_px^2 * channels], patches in row order.

    Each patch is flattened (row, column, channel); pixels beyond the last whole patch are left out,
    as a convolution with stride `patch_px` and no padding does.
    """
    items, height, width, channels = pixels.shape
    rows, cols = height // patch_px, width // patch_px
    x = pixels[:, : rows * patch_px, : cols * patch_px]
    x = x.reshape(items, rows, patch_px, cols, patch_px, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(items, rows * cols, patch_px * patch_px * channels)

"""Gemma's pictures and clips against the published processors."""

import logging
import warnings

import numpy as np
import pytest
from PIL import Image

from dflop_jax.config import DataConfig
from dflop_jax.data.media.fitted import FORM, Fitted, fitted_blocks
from dflop_jax.data.media.native import patch_places
from dflop_jax.data.media.video import Clip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    pytest.importorskip("transformers", minversion="5.24")
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        Gemma4ImageProcessorPil,
        get_aspect_ratio_preserving_size,
    )
    from transformers.video_utils import VideoMetadata, default_sample_indices_fn


def picture(width, height, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(noise)


def test_sizes_equal_the_published_function():
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (1, 5000), (5000, 1), (48, 48), (3000, 7), (7, 3000), (9999, 10000)]
    sizes += [tuple(int(n) for n in rng.integers(1, 3000, 2)) for _ in range(300)]
    for tokens in (70, 280, 1120):
        for width, height in sizes:
            want = get_aspect_ratio_preserving_size(height, width, 16, 9 * tokens, 3)
            rows, cols = fitted_blocks(width, height, 48, tokens)
            assert (rows * 48, cols * 48) == want, (width, height, tokens)
    widths, heights = np.array(sizes).T
    rows, cols = Fitted(merge=3, frames=1).blocks({"width": widths, "height": heights})
    assert rows.all()
    assert (rows * cols).max() <= 280


@pytest.mark.parametrize("size", [(100, 60), (300, 500), (20, 900)])
def test_patches_and_their_places(size):
    image = picture(*size)
    want = Gemma4ImageProcessorPil(max_soft_tokens=70)(image, return_tensors="np")
    native = Fitted(16, 3, 1, soft_tokens=70)
    grid = native.grid(dict(zip(("width", "height"), size)))
    patches = native.patches(native.resized(image, grid)[None])
    places = patch_places([grid], 3)
    n = len(patches)
    assert n == 9 * int(want["num_soft_tokens_per_image"][0])
    # Theirs go row by row and hold a pixel's colours side by side.
    theirs = want["pixel_values"][0, :n].reshape(n, 16 * 16, 3).swapaxes(1, 2).reshape(n, -1)
    order = places[:, 0] * grid[1] + places[:, 1]
    np.testing.assert_allclose(patches / 255, theirs[order], atol=1e-6)
    np.testing.assert_array_equal(places[:, 1::-1], want["image_position_ids"][0, :n][order])


@pytest.mark.parametrize("total", [1, 5, 32, 33, 900])
def test_frames_of_a_clip(total):
    clip = Clip(640, 360, total, 30000, 1001)
    layout = Fitted(merge=3, frames=1, max_frames=32).clip(clip)
    metadata = VideoMetadata(total_num_frames=total, fps=30000 / 1001)
    want = default_sample_indices_fn(metadata, num_frames=min(32, total))
    np.testing.assert_array_equal(layout.frames, want)
    metadata.frames_indices = want
    np.testing.assert_allclose(layout.seconds, metadata.timestamps)
    height, width = get_aspect_ratio_preserving_size(360, 640, 16, 9 * 70, 3)
    assert layout.grid == (height // 16, width // 16)


def test_limits_make_pictures_smaller_and_are_named():
    facts = {"patch_px": 16, "merge": 3, "soft_tokens": 280, "frame_tokens": 70}
    medium = FORM.build(facts, DataConfig(max_pixels=50 * 48**2, min_pixels=1), None)
    assert (medium.native.soft_tokens, medium.native.frame_tokens) == (50, 50)
    with pytest.raises(ValueError, match=r"data.max_pixels=100 must leave a block of 48x48"):
        FORM.build(facts, DataConfig(max_pixels=100, min_pixels=1), None)

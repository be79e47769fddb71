"""Dynamic tiling against the published InternVL processor: counts and pixels."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from dflop_jax.data.media.internvl_tiles import DynamicTiling
from models.processors import IMAGENET_MEAN, IMAGENET_STD

SIZES = [(1, 1), (448, 448), (449, 448), (896, 448), (20000, 1), (1, 20000), (1250, 1000),
         (634, 634), (633, 633), (700, 350), (3000, 1000), (20000, 20000)]  # fmt: skip


@pytest.fixture(scope="module")
def processor():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, not of what is tested
        pytest.importorskip("transformers")
        from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as pil
    return pil.GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448},
        crop_to_patches=True,
        image_mean=list(IMAGENET_MEAN),
        image_std=list(IMAGENET_STD),
    )


@pytest.mark.parametrize("limits", [(1, 1), (1, 6), (2, 5), (1, 12)])
def test_counts_are_the_processor_s(processor, limits):
    spec = DynamicTiling(min_tiles=limits[0], max_tiles=limits[1])
    rng = np.random.default_rng(limits[1])
    random = np.exp(rng.uniform(3, 8.5, (300, 2))).astype(int)
    simple = rng.integers(1, 7, (300, 2)) * rng.integers(50, 700, (300, 1))  # ties of ratios
    w, h = np.concatenate([SIZES, random, simple]).T
    options = {"min_patches": limits[0], "max_patches": limits[1]}
    expected = [processor.get_number_of_image_patches(int(b), int(a), options)
                for a, b in zip(w, h, strict=True)]  # fmt: skip
    _, tiles, _ = spec.count(w, h, w > 0)
    np.testing.assert_array_equal(tiles, expected)


def test_none_and_bad_settings():
    none = np.zeros(0, int)
    assert [len(a) for a in DynamicTiling().count(none, none, none)] == [0, 0, 0]
    for bad in ({"min_tiles": 3, "max_tiles": 2}, {"tile_px": 0}, {"min_tiles": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            DynamicTiling(**bad)

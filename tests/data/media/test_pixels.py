"""Pictures of every kind, cut as the published processors cut them; each is decoded only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.internvl_tiles import DynamicTiling
from tests.data.media.test_anyres import reference  # noqa: F401
from tests.data.media.test_internvl_tiles import processor  # noqa: F401
from tests.data.media_cases import made_pictures, normalized, read_upright, shared_files, upright

ALONE = np.array([True])


def telling(paths: Iterable[Path]) -> Iterator[Path]:
    """The smallest picture of each format, mode and orientation, and of each number of tiles by
    either rule, wide and high: others differ from these in what they show, and take minutes."""
    smallest: dict[tuple, tuple[int, Path]] = {}
    for path in paths:
        with Image.open(path) as image:
            width, height = image.size
            orientation = image.getexif().get(0x0112)
            kind = image.format, image.mode, orientation, getattr(image, "n_frames", 1) > 1
        sides = np.array([[width], [height]])
        any_res, tiling = (
            int(rule.count(*sides, ALONE)[1][0]) for rule in (AnyRes(), DynamicTiling())
        )
        for key in (kind, ("any_res", any_res, width > height), ("tiling", tiling, width > height)):
            smallest[key] = min(smallest.get(key, (width * height, path)), (width * height, path))
    yield from sorted({path for _, path in smallest.values()})


def test_every_kind_of_picture_is_cut_as_published(reference, processor, tmp_path):
    for k, path in enumerate([*telling(shared_files("images")), *made_pictures(tmp_path)]):
        given, image = upright(path), read_upright(path)
        assert image.size == given.size
        sides = np.array([[image.width], [image.height]])

        expected, _ = reference.pixels([given])
        tiles = AnyRes().cut_tiles(image, True)
        _, (n,), (n_tokens,) = AnyRes().count(*sides, ALONE)
        assert len(tiles) == len(expected[0]) == n
        assert n_tokens == reference.tokens(*image.size)
        assert np.array_equal(tiles, expected[0]), path

        full = k % 10 == 0  # normalising is slow, and the same for all
        out = processor([given], return_tensors="np", do_rescale=full, do_normalize=full)
        tiles = DynamicTiling().cut_tiles(image, True)
        (n,) = out["num_patches"]
        _, (found,), (n_tokens,) = DynamicTiling().count(*sides, ALONE)
        assert (len(tiles), n_tokens) == (found, 256 * found) == (n, 256 * n)
        expected = out["pixel_values"].transpose(0, 2, 3, 1)
        same = np.allclose(normalized(tiles), expected, 0, 1e-5) if full else (
            np.array_equal(tiles, expected)
        )  # fmt: skip
        assert same, path

"""AnyRes grids against an exact search, and pixels against Pillow's own tools."""

from fractions import Fraction

import numpy as np
import pytest
from PIL import Image, ImageOps

from dflop_jax.data.media.tiles import SimpleTiles
from dflop_jax.data.media.tiling import choose_grid, fit_in_box, picture_size, read_scaled


def picture_tiles(image, tile_px, max_tiles):
    return SimpleTiles(tile_px, 1, max_tiles).cut_tiles(image, True)


def read_picture(path, tile_px, max_tiles):
    """Tiles of a file by the way of all pictures of the plain layout."""
    layout = SimpleTiles(tile_px, 1, max_tiles)
    image, size = read_scaled(path, layout.min_size(*picture_size(path)))
    return layout.cut_tiles(image, True, size)


def exact_grid(width, height, px, max_tiles):
    """All grids with their kept and wasted area, in exact arithmetic; the sort does the choice."""
    if width <= px and height <= px:
        return (0, 0)
    grids = [(r, c) for r in range(1, 20) for c in range(1, 20) if 1 < r * c <= max_tiles]
    rated = []
    for r, c in grids:
        scale = min(Fraction(c * px, width), Fraction(r * px, height))
        w, h = max(1, int(width * scale)), max(1, int(height * scale))
        kept = min(w * h, width * height)
        rated.append((-kept, r * c * px * px - kept, (r, c)))
    return min(rated)[2] if rated else (0, 0)


@pytest.mark.parametrize("max_tiles", [1, 2, 6, 9])
def test_grid_is_the_best_of_all(max_tiles):
    rng = np.random.default_rng(max_tiles)
    exact = [(48, 48), (1, 1), (96, 48), (48, 144), (144, 144), (49, 30)]
    for width, height in [*exact, *np.exp(rng.uniform(0, 8.5, (300, 2))).astype(int)]:
        grid = choose_grid(int(width), int(height), 48, max_tiles)
        assert grid == exact_grid(int(width), int(height), 48, max_tiles)
        tiles = SimpleTiles(48, 1, max_tiles).n_tiles(width, height, alone=True)
        assert tiles == 1 + grid[0] * grid[1] <= 1 + max_tiles
        assert grid != (1, 1)


def test_fit_keeps_the_aspect_ratio_inside_the_box():
    for w, h in [(10, 10), (1, 1000), (1000, 1), (640, 480)]:
        a, b = fit_in_box(w, h, 96, 48)
        assert 1 <= a <= 96
        assert 1 <= b <= 48
        assert a == 96 or b == 48


def test_tiles_of_a_picture_that_fills_its_grid_are_its_parts():
    pixels = np.random.default_rng(0).integers(0, 255, (32, 48, 3)).astype(np.uint8)
    tiles = picture_tiles(Image.fromarray(pixels), 16, 9)
    parts = [pixels[r : r + 16, c : c + 16] for r in (0, 16) for c in (0, 16, 32)]
    np.testing.assert_array_equal(tiles[1:], parts)
    assert tiles.dtype == np.uint8


def test_padding_is_black_and_centred():
    tiles = picture_tiles(Image.new("RGB", (100, 20), "white"), 16, 2)
    grid = np.concatenate(tiles[1:], axis=1)  # 1 x 2 tiles, content 32 x 6
    white = np.flatnonzero(grid.all(axis=(1, 2)))
    assert white.tolist() == [5, 6, 7, 8, 9, 10]
    assert (np.delete(grid, white, axis=0) == 0).all()
    assert (tiles[0] == 255).all()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png", "tiff"])
def test_exif_orientation(tmp_path, orientation, kind):
    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 255, (6, 9, 3)).astype(np.uint8)).resize((90, 60))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{kind}"
    image.save(path, exif=exif)
    with Image.open(path) as stored:
        upright = ImageOps.exif_transpose(stored).convert("RGB")
    assert picture_size(path) == upright.size == ((90, 60) if orientation < 5 else (60, 90))
    np.testing.assert_array_equal(read_picture(path, 48, 9), picture_tiles(upright, 48, 9))


@pytest.mark.parametrize("orientation", [1, 6])
def test_large_jpeg_is_decoded_small_but_looks_the_same(tmp_path, orientation):
    y, x = np.mgrid[0:1200, 0:2000]
    pixels = np.stack([x / 8, y / 5, (x + y) / 16], -1).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    upright = Image.fromarray(pixels if orientation == 1 else np.rot90(pixels, -1))
    got = read_picture(tmp_path / "a.jpg", 48, 9).astype(int)
    assert np.abs(got - picture_tiles(upright, 48, 9)).mean() < 2


def test_modes_become_rgb(tmp_path):
    def one(image, name="a.png", **options):
        image.save(tmp_path / name, **options)
        return read_picture(tmp_path / name, 16, 1)[0, 8, 8].tolist()

    assert one(Image.new("RGBA", (8, 8), (255, 0, 0, 0))) == [255, 255, 255]
    assert one(Image.new("RGBA", (8, 8), (255, 0, 0, 255))) == [255, 0, 0]
    assert one(Image.new("L", (8, 8), 77)) == [77] * 3
    for value in (0, 200, 40000, 65535):
        assert one(Image.fromarray(np.full((8, 8), value, np.uint16))) == [round(value / 257)] * 3
        whole = Image.fromarray(np.full((8, 8), value, np.int32))
        assert one(whole, "a.tif") == [round(value / 257)] * 3
        part = Image.fromarray(np.full((8, 8), value / 65535, np.float32))
        assert one(part, "a.tif") == [round(value / 257)] * 3
    for value in (np.int32(65536), np.int32(-1), np.float32(1.5), np.float32("nan")):
        with pytest.raises(ValueError, match=r"a\.tif.*no known range"):
            one(Image.fromarray(np.full((8, 8), value)), "a.tif")
    assert one(Image.new("P", (8, 8), 0), "a.gif", transparency=0) == [255, 255, 255]
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue")]
    first = one(frames[0], "b.gif", save_all=True, append_images=frames[1:])
    assert first == [255, 0, 0]

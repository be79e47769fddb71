"""Tile layouts against the published processors (LLaVA-OneVision's, InternVL's) and an exact
search: counts, pixels, packed features, and pictures of every kind."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageOps

from dflop_jax.data.media.anyres import AnyRes
from dflop_jax.data.media.pictures import picture_size, read_picture
from dflop_jax.data.media.tiles import DynamicTiling, SimpleTiles, choose_grid
from models.processors import IMAGENET_MEAN, IMAGENET_STD
from tests.data.media_cases import made_pictures, normalized, shared_files, upright
from tests.verify.folders import load

SPEC = AnyRes()
# sizes a careless user feeds: tiny, exact, thin, huge, either side of the downscaling limit
SIZES = [(1, 1), (2, 1), (384, 384), (385, 384), (768, 384), (1, 1000), (3000, 2), (20000, 20),
         (20000, 20000), (1152, 1152), (1153, 1157), (1300, 1300), (2304, 2304), (4032, 3024),
         (640, 480), (336, 1008)]  # fmt: skip
ALONE = np.array([True])


@pytest.fixture(scope="module")
def reference():
    load("torch")
    of = "transformers.models.llava_onevision."
    pil = load(f"{of}image_processing_pil_llava_onevision")
    modeling = load(f"{of}modeling_llava_onevision")
    processing = load(f"{of}processing_llava_onevision")

    class Reference:
        images = pil.LlavaOnevisionImageProcessorPil(image_mean=[0.5] * 3, image_std=[0.5] * 3)

        def tokens(self, width, height, spec=SPEC):
            """The processor's own count, of a processor without a tokenizer."""
            p = object.__new__(processing.LlavaOnevisionProcessor)
            p.image_processor = SimpleNamespace(image_grid_pinpoints=spec.pinpoints)
            p.num_image_tokens = spec.patches**2
            p.vision_aspect_ratio = f"anyres_max_{spec.max_tiles}"
            return p._get_number_of_features(height, width, spec.tile_px, spec.tile_px)

        def model(self, spec=SPEC):
            side = spec.tile_px // spec.patches
            vision = SimpleNamespace(image_size=spec.tile_px, patch_size=side)
            m, pinpoints = (
                object.__new__(modeling.LlavaOnevisionModel),
                [*map(list, spec.pinpoints)],
            )
            config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=pinpoints)
            m.__dict__["config"] = config
            return m

        def pixels(self, batch):
            out = self.images(batch, return_tensors="np", do_rescale=False, do_normalize=False)
            return out["pixel_values"].transpose(0, 1, 3, 4, 2), out["image_sizes"]

    return Reference()


@pytest.fixture(scope="module")
def internvl():
    pil = load("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    return pil.GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True,
        image_mean=list(IMAGENET_MEAN), image_std=list(IMAGENET_STD),
    )  # fmt: skip


def test_any_size_under_any_settings_counts_as_it_is_placed(reference):
    """Of those that can be used, as the processor counts, too."""
    rng, usable = np.random.default_rng(0), 0
    for _ in range(400):
        px = int(rng.choice([4, 10, 32, 384]))
        sides = range(1, int(rng.integers(2, 8)))
        grids = tuple((px * r, px * c) for r in sides for c in sides)
        spec = AnyRes(px, int(rng.integers(1, 30)), int(rng.integers(1, 13)), grids)
        width, height = np.exp(rng.uniform(0, np.log(20 * px), 2)).astype(int).tolist()
        (fits,), _, (tokens,) = spec.count(*np.array([[width], [height]]), ALONE)
        if fits:
            usable += 1
            case = spec.tile_px, spec.patches, spec.max_tiles, len(spec.pinpoints), width, height
            assert tokens == len(spec.token_sources(width, height, alone=True)), case
            assert tokens == reference.tokens(width, height, spec), case
    assert usable > 300


def gather(features, sources, newline):
    """What a device does with the sources: features [tiles * patches, d] -> [t, d]."""
    features = np.concatenate([features, np.zeros_like(features, shape=(1, features.shape[1]))])
    out = (features[sources["index"]] * sources["weight"][..., None]).sum(1)
    return np.where(sources["newline"][:, None], newline, out)


# Of the last no column is kept.
SMALL = AnyRes(10, 2, 9, tuple((10 * r, 10 * c) for r in range(1, 4) for c in range(1, 4)))
CASES = [*((SPEC, size) for size in SIZES), (SMALL, (12, 89))]


@pytest.mark.parametrize("spec, size", CASES)
def test_sources_pack_features_as_the_model_does(reference, spec, size):
    import torch

    rng = np.random.default_rng(0)
    _, (tiles,), (tokens,) = spec.count(*np.array([size]).T, ALONE)
    features = rng.standard_normal((tiles, spec.patches**2, 5)).astype(np.float32)
    newline = rng.standard_normal(5).astype(np.float32)
    (expected,), _ = reference.model(spec).pack_image_features(
        [torch.from_numpy(features)], [list(size[::-1])], torch.from_numpy(newline)
    )
    sources = spec.token_sources(*size, alone=True)
    got = gather(features.reshape(-1, 5), sources, newline)
    assert len(sources) == tokens == len(expected)
    np.testing.assert_allclose(got, expected.numpy(), atol=2e-5)


@pytest.mark.parametrize("frames", [0, 1, 3])
def test_clips_are_pooled_as_the_model_does(reference, frames):
    import torch

    features = np.random.default_rng(1).standard_normal((frames, 729, 5)).astype(np.float32)
    newline = np.full(5, 7, np.float32)
    sources = SPEC.clip_token_sources(frames)
    assert len(sources) == SPEC.count_clips(frames) == 196 * frames + 1
    got = gather(features.reshape(-1, 5), sources, newline)
    np.testing.assert_array_equal(got[-1], newline)
    if frames:
        pooled = reference.model().apply_pooling(torch.from_numpy(features))
        np.testing.assert_allclose(got[:-1], pooled.numpy().reshape(-1, 5), atol=2e-5)


def test_several_pictures_are_squares(reference, tmp_path):
    paths = [*shared_files("images")[:6], *made_pictures(tmp_path)]
    expected, sizes = reference.pixels([[upright(p) for p in paths]])
    _, *counts = SPEC.count(sizes[:, 1], sizes[:, 0], np.zeros(len(sizes), bool))
    assert {tuple(c.tolist()) for c in np.stack(counts, 1)} == {(1, 730)}
    assert len(SPEC.token_sources(5, 9, alone=False)) == 730
    for path, pixels in zip(paths, expected, strict=True):
        image = read_picture(path)
        assert np.array_equal(SPEC.cut_tiles(image, False, image.size), pixels), path


def test_no_picture_thin_ones_and_bad_settings():
    none = np.zeros(0, int)
    for layout in (SPEC, DynamicTiling(), SimpleTiles(48, 1)):
        assert [len(a) for a in layout.count(none, none, none > 0)] == [0, 0, 0]
    sizes = np.array([(1, 5000), (1, 2304), (1, 2305), (20000, 1), (20000, 20), (1, 1)])
    expected = [max(int(w * min(1, s)) * int(h * min(1, s)) for s in [2304 / max(w, h)]) > 0
                for w, h in sizes.tolist()]  # fmt: skip
    usable, tiles, _ = SPEC.count(*sizes.T, np.ones(len(sizes), bool))
    np.testing.assert_array_equal(usable, expected)
    assert tiles[1] == 7  # a column of six tiles and the whole
    for pinpoints in ((), ((384, 400),)):
        with pytest.raises(ValueError, match="no multiples of tile_px=384"):
            AnyRes(pinpoints=pinpoints)


@pytest.mark.parametrize("max_tiles", [1, 6, 12])
def test_dynamic_counts_are_the_processor_s(internvl, max_tiles):
    rng = np.random.default_rng(max_tiles)
    random = np.exp(rng.uniform(3, 8.5, (300, 2))).astype(int)
    simple = rng.integers(1, 7, (300, 2)) * rng.integers(50, 700, (300, 1))  # ties of ratios
    exact = [(448, 448), (449, 448), (896, 448), (634, 634), (633, 633), (700, 350)]
    w, h = np.concatenate([SIZES, exact, random, simple]).T
    options = {"min_patches": 1, "max_patches": max_tiles}
    expected = [internvl.get_number_of_image_patches(int(b), int(a), options)
                for a, b in zip(w, h, strict=True)]  # fmt: skip
    _, tiles, _ = DynamicTiling(max_tiles=max_tiles).count(w, h, w > 0)
    np.testing.assert_array_equal(tiles, expected)


def test_every_kind_of_picture_is_cut_as_published(reference, internvl, tmp_path):
    for k, path in enumerate([*shared_files("images")[::5], *made_pictures(tmp_path)]):
        given, image = upright(path), read_picture(path)
        assert image.size == given.size
        sides = np.array([image.size]).T

        expected, _ = reference.pixels([given])
        tiles = SPEC.cut_tiles(image, True, image.size)
        assert SPEC.count(*sides, ALONE)[1] == len(tiles)
        assert np.array_equal(tiles, expected[0]), path

        full = k % 10 == 0  # normalising is slow, and the same for all
        out = internvl([given], return_tensors="np", do_rescale=full, do_normalize=full)
        tiles = DynamicTiling().cut_tiles(image, True, image.size)
        _, (found,), (n_tokens,) = DynamicTiling().count(*sides, ALONE)
        assert (len(tiles), n_tokens) == (found, 256 * found)
        expected = out["pixel_values"].transpose(0, 2, 3, 1)
        same = np.allclose(normalized(tiles), expected, 0, 1e-5) if full else (
            np.array_equal(tiles, expected)
        )  # fmt: skip
        assert same, path


def picture_tiles(image, tile_px, max_tiles):
    return SimpleTiles(tile_px, 1, max_tiles).cut_tiles(image, True, image.size)


def read_tiles(path, tile_px, max_tiles):
    """Tiles of a file by the way of all pictures of the plain layout."""
    layout, size = SimpleTiles(tile_px, 1, max_tiles), picture_size(path)
    return layout.cut_tiles(read_picture(path, size, layout.min_size(*size)), True, size)


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
    for width, height in [*exact, *np.exp(rng.uniform(0, 8.5, (300, 2))).astype(int).tolist()]:
        grid = choose_grid(width, height, 48, max_tiles)
        assert grid == exact_grid(width, height, 48, max_tiles)
        tiles = SimpleTiles(48, 1, max_tiles).n_tiles(width, height, alone=True)
        assert tiles == 1 + grid[0] * grid[1] <= 1 + max_tiles


def test_a_grid_holds_the_picture_and_black_around_it():
    pixels = np.random.default_rng(0).integers(0, 255, (32, 48, 3)).astype(np.uint8)
    tiles = picture_tiles(Image.fromarray(pixels), 16, 9)
    parts = [pixels[r : r + 16, c : c + 16] for r in (0, 16) for c in (0, 16, 32)]
    np.testing.assert_array_equal(tiles[1:], parts)
    assert tiles.dtype == np.uint8
    tiles = picture_tiles(Image.new("RGB", (100, 20), "white"), 16, 2)
    grid = np.concatenate(tiles[1:], axis=1)  # 1 x 2 tiles, content 32 x 6
    assert (grid[5:11] == 255).all()
    assert (np.delete(grid, range(5, 11), axis=0) == 0).all()
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
        turned = ImageOps.exif_transpose(stored).convert("RGB")
    assert picture_size(path) == turned.size == ((90, 60) if orientation < 5 else (60, 90))
    np.testing.assert_array_equal(read_tiles(path, 48, 9), picture_tiles(turned, 48, 9))


@pytest.mark.parametrize("orientation", [1, 6])
def test_large_jpeg_is_decoded_small_but_looks_the_same(tmp_path, orientation):
    y, x = np.mgrid[0:1200, 0:2000]
    pixels = np.stack([x / 8, y / 5, (x + y) / 16], -1).astype(np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "a.jpg", exif=exif, quality=95)
    turned = Image.fromarray(pixels if orientation == 1 else np.rot90(pixels, -1))
    got = read_tiles(tmp_path / "a.jpg", 48, 9).astype(int)
    assert np.abs(got - picture_tiles(turned, 48, 9)).mean() < 2
    eighth = turned.width // 8, turned.height // 8
    assert read_picture(tmp_path / "a.jpg", min_size=eighth).size == eighth


def test_modes_become_rgb(tmp_path):
    def one(image, name="a.png", **options):
        image.save(tmp_path / name, **options)
        return read_tiles(tmp_path / name, 16, 1)[0, 8, 8].tolist()

    assert one(Image.new("RGBA", (8, 8), (255, 0, 0, 0))) == [255, 255, 255]
    assert one(Image.new("RGBA", (8, 8), (255, 0, 0, 255))) == [255, 0, 0]
    assert one(Image.new("L", (8, 8), 77)) == [77] * 3
    for value in (0, 200, 40000, 65535):
        assert one(Image.fromarray(np.full((8, 8), value, np.uint16))) == [round(value / 257)] * 3
        for number in (np.int32(value), np.float32(value / 65535)):
            image = Image.fromarray(np.full((8, 8), number))
            assert one(image, "a.tif") == [round(value / 257)] * 3
    for value in (np.int32(65536), np.int32(-1), np.float32(1.5), np.float32("nan")):
        with pytest.raises(ValueError, match=r"a\.tif.*no known range"):
            one(Image.fromarray(np.full((8, 8), value)), "a.tif")
    assert one(Image.new("P", (8, 8), 0), "a.gif", transparency=0) == [255, 255, 255]
    frames = [Image.new("RGB", (8, 8), c) for c in ("red", "blue")]
    first = one(frames[0], "b.gif", save_all=True, append_images=frames[1:])
    assert first == [255, 0, 0]

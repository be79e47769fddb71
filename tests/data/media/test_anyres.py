"""AnyRes against the published LLaVA-OneVision processor: counts, pixels and packed features."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from dflop_jax.data.media.anyres import AnyRes
from tests.data.media_cases import made_pictures, read_upright, shared_files, upright

SPEC = AnyRes()
# sizes a careless user feeds: tiny, exact, thin, huge, either side of the downscaling limit
SIZES = [(1, 1), (2, 1), (384, 384), (385, 384), (768, 384), (1, 1000), (3000, 2), (20000, 20),
         (20000, 20000), (1152, 1152), (1153, 1157), (1300, 1300), (2304, 2304), (4032, 3024),
         (640, 480), (336, 1008)]  # fmt: skip


@pytest.fixture(scope="module")
def reference():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, not of what is tested
        pytest.importorskip("torch")
        pytest.importorskip("transformers")
        from transformers.models.llava_onevision import image_processing_pil_llava_onevision as pil
        from transformers.models.llava_onevision import modeling_llava_onevision as modeling
        from transformers.models.llava_onevision import processing_llava_onevision as processing

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
            m = object.__new__(modeling.LlavaOnevisionModel)
            pinpoints = [list(p) for p in spec.pinpoints]
            m.__dict__["config"] = SimpleNamespace(
                vision_config=vision, image_grid_pinpoints=pinpoints
            )
            return m

        def pixels(self, batch):
            out = self.images(batch, return_tensors="np", do_rescale=False, do_normalize=False)
            return out["pixel_values"].transpose(0, 1, 3, 4, 2), out["image_sizes"]

    return Reference()


def random_layout(rng):
    """A picture of any size, and settings that are small enough for degenerate grids."""
    px = int(rng.choice([4, 10, 32, 384]))
    sides = range(1, int(rng.integers(2, 8)))
    grids = tuple((px * r, px * c) for r in sides for c in sides)
    patches, most = int(rng.integers(1, 30)), int(rng.integers(1, 13))
    size = np.exp(rng.uniform(0, np.log(20 * px), 2)).astype(int).tolist()
    return AnyRes(px, patches, most, grids), *size


def test_any_size_under_any_settings_counts_as_it_is_placed(reference):
    """Of those that can be used, as the processor counts, too."""
    rng, usable = np.random.default_rng(0), 0
    for _ in range(400):
        spec, width, height = random_layout(rng)
        (fits,), _, (tokens,) = spec.count(*np.array([[width], [height]]), np.array([True]))
        if fits:
            usable += 1
            case = spec.tile_px, spec.patches, spec.max_tiles, len(spec.pinpoints), width, height
            assert tokens == len(spec.token_sources(width, height, alone=True)), case
            assert tokens == reference.tokens(width, height, spec), case
    assert usable > 300


def test_a_grid_that_keeps_no_column(reference):
    import torch

    spec = AnyRes(10, 2, 9, tuple((10 * r, 10 * c) for r in range(1, 4) for c in range(1, 4)))
    sources = spec.token_sources(12, 89, alone=True)
    _, (tiles,), (tokens,) = spec.count(*np.array([[12], [89]]), np.array([True]))
    assert tokens == len(sources) == reference.tokens(12, 89, spec) == 4 + 6
    features = np.random.default_rng(0).standard_normal((tiles, 4, 3)).astype(np.float32)
    (expected,), _ = reference.model(spec).pack_image_features(
        [torch.from_numpy(features)], [[89, 12]], torch.full((3,), 7.0)
    )
    got = gather(features.reshape(-1, 3), sources, np.full(3, 7, np.float32))
    np.testing.assert_array_equal(got, expected.numpy())


def gather(features, sources, newline):
    """What a device does with the sources: features [tiles * patches, d] -> [t, d]."""
    features = np.concatenate([features, np.zeros_like(features, shape=(1, features.shape[1]))])
    out = (features[sources["index"]] * sources["weight"][..., None]).sum(1)
    return np.where(sources["newline"][:, None], newline, out)


@pytest.mark.parametrize("size", SIZES)
def test_sources_pack_features_as_the_model_does(reference, size):
    import torch

    rng = np.random.default_rng(0)
    _, (tiles,), (tokens,) = SPEC.count(*np.array([size]).T, np.array([True]))
    features = rng.standard_normal((tiles, 729, 5)).astype(np.float32)
    newline = rng.standard_normal(5).astype(np.float32)
    (expected,), _ = reference.model().pack_image_features(
        [torch.from_numpy(features)], [list(size[::-1])], torch.from_numpy(newline)
    )
    sources = SPEC.token_sources(*size, alone=True)
    got = gather(features.reshape(-1, 5), sources, newline)
    assert len(sources) == tokens == len(expected)
    np.testing.assert_allclose(got, expected.numpy(), atol=2e-5)
    sums = np.where(sources["newline"], 0, 1)
    np.testing.assert_allclose(sources["weight"].sum(1), sums, atol=1e-6)


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
        tile = SPEC.cut_tiles(read_upright(path), alone=False)
        assert np.array_equal(tile, pixels), path


def test_no_picture_and_bad_settings():
    assert [len(a) for a in SPEC.count(*np.zeros((2, 0), int), np.zeros(0, bool))] == [0, 0, 0]
    sizes = np.array([(1, 5000), (1, 2304), (1, 2305), (20000, 1), (20000, 20), (1, 1)])
    expected = [max(int(w * min(1, s)) * int(h * min(1, s)) for s in [2304 / max(w, h)]) > 0
                for w, h in sizes.tolist()]  # fmt: skip
    usable, tiles, tokens = SPEC.count(*sizes.T, np.ones(len(sizes), bool))
    np.testing.assert_array_equal(usable, expected)
    assert tiles[1] == 7  # a column of six tiles and the whole
    assert tokens[1] == len(SPEC.token_sources(1, 2304, alone=True))
    with pytest.raises(ValueError, match="no multiples of tile_px=384"):
        AnyRes(pinpoints=((384, 400),))
    with pytest.raises(ValueError, match="missing"):
        AnyRes(pinpoints=())

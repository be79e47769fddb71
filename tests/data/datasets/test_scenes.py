"""Answers recomputed from the pixels alone, and the shape of the mixture."""

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import ByteTokenizer, MediaSpec, SceneSource
from dflop_jax.data.datasets.scenes import COLOURS
from tests.data.views import media_spec, supervised, tiles, tokens

SPEC = media_spec(48, 9)
TOKENIZER = ByteTokenizer()


def source(n=400, seed=0, spec=SPEC, limits=None, **options):
    return SceneSource(n, seed, spec, TOKENIZER, limits, **options)


def colour_of(picture):
    pixels = np.asarray(picture.render()).astype(int)
    is_inked = np.ptp(pixels, axis=-1) > 0  # not grey
    values, counts = np.unique(pixels[is_inked], axis=0, return_counts=True)
    common = tuple(values[counts.argmax()].tolist())
    return next(name for name, rgb in COLOURS.items() if rgb == common)


def answer_from_pixels(scene):
    p = scene.pictures
    match scene.kind:
        case "colour":
            return colour_of(p[0])
        case "same":
            return "yes" if colour_of(p[0]) == colour_of(p[1]) else "no"
        case "which":
            target = scene.question.removesuffix("?").split()[-1]
            found = [k for k, x in enumerate(p, 1) if colour_of(x) == target]
            assert len(found) == 1
            return str(found[0])
        case "sum":
            a, b = scene.question.removesuffix("=?").split("+")
            return str(int(a) + int(b))
        case "first word":
            return scene.question.split(": ")[1].split()[0]
    return scene.answer  # of a shape or place, which colours do not tell


@pytest.mark.parametrize("split", ["train", "eval"])
def test_answers_follow_from_the_pixels(split):
    kinds = set()
    data = source(split=split)
    for i in range(400):
        scene = data.scene(i)
        kinds.add(scene.kind)
        assert scene.answer == answer_from_pixels(scene), (i, scene)
    assert len(kinds) == 11


def test_samples_repeat_have_their_load_and_differ_between_seeds_and_splits():
    a, b = source(), source()
    for i in range(60):
        x, y = a.sample(i), b.sample(i)
        assert x.load == a.load(i) == y.load
        np.testing.assert_array_equal(tiles(x), tiles(y))
        np.testing.assert_array_equal(tokens(x), tokens(y))
        answer = TOKENIZER.decode(tokens(x)[supervised(x)])
        assert answer == a.scene(i).answer
    others = [source(seed=1), source(split="eval")]
    assert all([s.scene(i) for i in range(20)] != [a.scene(i) for i in range(20)] for s in others)


def test_scenes_at_native_resolution():
    facts = {"form": "native", "patch_px": 4, "merge": 2, "frames": 2}
    limits = DataConfig(
        max_tiles=4, max_frames=8, max_tokens=4096, min_pixels=256, max_pixels=6000,
        max_clip_pixels=20_000,
    )  # fmt: skip
    options = {"n": 60, "spec": MediaSpec.of({"vision": facts}, {}), "limits": limits}
    data, grey = source(**options), source(**options, blank_images=True)
    lengths = set()
    for i in range(60):
        sample, scene = data.sample(i), data.scene(i)
        assert sample.load == data.load(i)
        pieces = sample.load.lengths("vision")
        lengths |= set(pieces)
        clips = [p.frames for p in scene.pictures if p.frames]
        stills = len(scene.pictures) - len(clips)
        assert len(pieces) == stills + sum(-(-min(n, 8) // 2) for n in clips)
        text = TOKENIZER.decode(tokens(sample))
        assert text.count(" seconds>") == len(pieces) - stills
        assert TOKENIZER.decode(tokens(sample)[supervised(sample)]) == scene.answer
        if pieces:
            assert len(sample.fields["vision"]["patches"]) == sum(pieces)
            blank = grey.sample(i)
            assert (blank.fields["vision"]["patches"] == 128).all()
            assert blank.load == sample.load
    assert len(lengths) > 5  # many resolutions


@pytest.mark.parametrize("oversize", ["truncate", "drop", "error"])
def test_oversize_scenes(oversize):
    data = source(limits=DataConfig(max_tokens=90, oversize=oversize))
    if oversize == "error":
        with pytest.raises(ValueError, match=r"scenes.*max_tokens=90"):
            [data.load(i) for i in range(50)]
        return
    for i in range(50):
        sample = data.sample(i)
        assert sample.load == data.load(i)
        assert len(tokens(sample)) <= 90
        assert TOKENIZER.decode(tokens(sample)[supervised(sample)]) == data.scene(i).answer

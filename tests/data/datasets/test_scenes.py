"""Answers recomputed from the pixels alone, and the shape of the mixture."""

import numpy as np
import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import ByteTokenizer, MediaSpec, SceneSource
from dflop_jax.data.datasets.scenes import COLOURS, draw_scene
from tests.data.views import media_spec, supervised, tiles, tokens

SPEC = media_spec(48, 9)
TOKENIZER = ByteTokenizer()


def source(n=400, seed=0, spec=SPEC, limits=None, **options):
    return SceneSource(n, seed, spec, TOKENIZER, limits, **options)


def inked(picture, time=0.0):
    """RGB pixels and where they are not grey."""
    pixels = np.asarray(picture.render(time)).astype(int)
    return pixels, np.ptp(pixels, axis=-1) > 0


def colour_of(picture):
    pixels, ink = inked(picture)
    values, counts = np.unique(pixels[ink], axis=0, return_counts=True)
    common = tuple(values[counts.argmax()].tolist())
    return next(name for name, rgb in COLOURS.items() if rgb == common)


def blobs(ink):
    """Number of 4-connected regions, by flood fill."""
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(ink), strict=True)}
    n = 0
    while left:
        n, front = n + 1, [left.pop()]
        while front:
            y, x = front.pop()
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if near in left:
                    left.remove(near)
                    front.append(near)
    return n


def form_of(picture):
    """Shape by how much of its bounding box it fills: all, pi / 4, or half."""
    _, ink = inked(picture)
    ys, xs = np.nonzero(ink)
    fill = ink.sum() / ((np.ptp(ys) + 1) * (np.ptp(xs) + 1))
    return min([("square", 1.0), ("circle", np.pi / 4), ("triangle", 0.5)],
               key=lambda f: abs(f[1] - fill))[0]  # fmt: skip


def centre_of(picture, time=0.0):
    """Centre of the ink, 0 to 1 in each direction."""
    _, ink = inked(picture, time)
    ys, xs = np.nonzero(ink)
    return np.array([(xs.min() + xs.max()) / 2 / picture.width,
                     (ys.min() + ys.max()) / 2 / picture.height])  # fmt: skip


def side_of(offset, names):
    x, y = offset
    left, right, top, bottom = names
    return (left if x < 0 else right) if abs(x) > abs(y) else (top if y < 0 else bottom)


def answer_from_pixels(scene):
    p = scene.pictures
    match scene.kind:
        case "colour":
            return colour_of(p[0])
        case "kind":
            return form_of(p[0])
        case "count":
            return str(blobs(inked(p[0])[1]))
        case "place":
            return side_of(centre_of(p[0]) - 0.5, ("left", "right", "top", "bottom"))
        case "more":
            first, second = (blobs(inked(x)[1]) for x in p)
            assert first != second
            return "first" if first > second else "second"
        case "same":
            return "yes" if colour_of(p[0]) == colour_of(p[1]) else "no"
        case "which":
            target = scene.question.removesuffix("?").split()[-1]
            found = [k for k, x in enumerate(p, 1) if colour_of(x) == target]
            assert len(found) == 1
            return str(found[0])
        case "direction":
            move = centre_of(p[0], 1.0) - centre_of(p[0], 0.0)
            return side_of(move, ("left", "right", "up", "down"))
        case "mover":
            first, last = (inked(p[0], t)[1] for t in (0.0, 1.0))
            half = p[0].height // 2
            moved = [(first[s] != last[s]).any() for s in (slice(0, half), slice(half, None))]
            assert sum(moved) == 1
            crop = p[0].render().crop((0, 0, p[0].width, half) if moved[0] else
                                      (0, half, p[0].width, p[0].height))  # fmt: skip
            return form_of(type("Crop", (), {"render": lambda self, _: crop})())
        case "sum":
            a, b = scene.question.removesuffix("=?").split("+")
            return str(int(a) + int(b))
        case "first word":
            return scene.question.split(": ")[1].split()[0]
    raise AssertionError(scene.kind)


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


def test_the_smallest_pictures_have_their_shape_in_the_middle():
    rng, limits = np.random.default_rng(0), DataConfig()
    scenes = [draw_scene(rng, 8, limits) for _ in range(400)]
    singles = [p for s in scenes for p in s.pictures if len(p.shapes) == 1 and not p.frames]
    assert any(min(p.width, p.height) < 8 for p in singles)
    for p in singles:
        assert 0 < p.shapes[0].x < p.width
        assert 0 < p.shapes[0].y < p.height


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

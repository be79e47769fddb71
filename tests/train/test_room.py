"""The largest picture and the longest clip that a plan holds, against numbers by hand."""

import pytest

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig
from dflop_jax.contract import edges_of
from dflop_jax.data.largest import LoneMedium
from dflop_jax.records import Bucket, Layout, Load, Plan, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.train import prepare, room
from dflop_jax.train.room import LargestMedium, SampleRoom, sample_room


def place_of(**data):
    config = Config(
        model=ModelConfig(factory="models.qwen3_vl:build", size="qwen3-vl-tiny"),
        data=DataConfig(min_pixels=1024, max_pixels=40_000, **data),
        plan=PlanConfig(policy="dflop", hardware="a100-80", devices=2),
    )
    return prepare.set_up(config)


def plan_of(place, *buckets):
    return Plan(
        "dflop",
        Layout(
            (SubmeshPlan("vision", 0, 1, 1, 1), SubmeshPlan("llm", 1, 1, 1, 1)),
            tuple(
                SegmentPlan(name, name, 0, m.n_layers, name, True, True)
                for name, m in place.model.modules.items()
            ),
            tuple(Bucket.of({"vision": Shape(*v), "llm": Shape(*n)}) for v, n in buckets),
            edges=edges_of(place.model),
        ),
    )


def test_native_resolution_by_hand():
    """Blocks are 16 x 16 pixels: 4 patches, 1 token. A picture of 5 x 5 of them has 100 patches, of
    8 x 8 it has 64 tokens. A clip's pairs have 28, 15, 8 and 6 blocks each when there are 1 to 4 of
    them, and 13 bytes of time stamp."""
    place = place_of(max_frames=8, max_clip_pixels=16_384)
    plan = plan_of(place, ((2, 128), (2, 64)), ((1, 32), (1, 32)))
    vision, llm, every = sample_room(place, plan)
    whole = LargestMedium(clip_s=4.0, clip_frames=8, unlimited=True)
    assert vision == SampleRoom("vision", 256, 128, LargestMedium((80, 80)), whole)
    assert llm == SampleRoom(
        "llm", 128, 64, LargestMedium((128, 128)), LargestMedium(clip_s=3.0, clip_frames=6)
    )
    assert every == SampleRoom(
        "all", 0, 0, LargestMedium((80, 80)), LargestMedium(clip_s=3.0, clip_frames=6)
    )
    none = sample_room(place, plan_of(place, ((1, 8), (1, 8))))[-1]
    assert (none.picture, none.clip) == (LargestMedium(), LargestMedium())


@pytest.mark.parametrize("grouping, tiles", [("balanced", 4), ("arrival", 2)])
def test_tiles(grouping, tiles):
    """Two ranks of two tiles each; without balancing a sample stays on one of them."""
    config = Config(
        model=ModelConfig(size="nano"),
        data=DataConfig(max_frames=9, max_tiles=9),
        plan=PlanConfig(policy="dflop", hardware="a100-80", devices=4),
    )
    place = prepare.set_up(config)
    px = place.model.preprocessing["vision"]["tile_px"]
    tile = place.model.piece_tokens["vision"]
    plan = (
        plan_of(place, ((2, tile), (1, 4096)))
        .with_layout(submeshes=(SubmeshPlan("vision", 0, 1, 2, 1), SubmeshPlan("llm", 2, 1, 2, 1)))
        .with_scheduling(grouping=grouping)
    )
    vision, llm, every = sample_room(place, plan)
    assert vision.clip == every.clip == LargestMedium(clip_s=tiles / 2, clip_frames=tiles)
    assert vision.tokens == {"balanced": 4, "arrival": 2}[grouping] * tile
    assert vision.picture == every.picture
    width, height = vision.picture.picture
    assert width % px == height % px == 0
    assert (llm.picture.unlimited, llm.clip.unlimited) == (True, True)


def test_of_pictures_of_one_size_the_squarest_is_shown(monkeypatch):
    sides = [(1, 9), (3, 3), (9, 1), (1, 10), (2, 5), (5, 2), (10, 1), (4, 3)]
    one = Load({"vision": (1,)})
    rising = [LoneMedium({"width": 384 * w, "height": 384 * h}, one) for w, h in sides]
    for first_too_large, shown in ((3, (1152, 1152)), (7, (768, 1920))):
        monkeypatch.setattr(room, "beyond", lambda *_, n=first_too_large: [n])
        assert room._most(rising, None) == LargestMedium(shown)

"""A small Qwen3-VL, what its samples hold, a schedule of them and plans: without torch, since the
processes of a job read this too."""

from itertools import pairwise

import jax.numpy as jnp

from dflop_jax.contract import edges_of
from dflop_jax.records import Bucket, Layout, Plan, Schedule, SegmentPlan, Shape, SubmeshPlan
from models import qwen3_vl
from models.qwen3_vl_sizes import NativeVisionSize, Qwen3VLSize
from models.sizes import DecoderSize
from tests.rows import group_of_rows

SIZE = Qwen3VLSize(
    DecoderSize(
        24,
        4,
        4,
        2,
        40,
        50,
        rope_theta=1e4,
        qkv_bias=False,
        tied=True,
        qk_norm=True,
        head_size=16,
        mrope_sections=(4, 2, 2),
    ),
    NativeVisionSize(32, 3, 2, 40, (0, 2), patch_px=2, side=5),
)
MODEL = qwen3_vl.Qwen3VL(SIZE, jnp.dtype("float32"))
SHAPES = {"vision": Shape(2, 128), "llm": Shape(2, 64)}
CONTENTS = (
    (("text", 3), ("image", 8, 6), ("text", 4)),
    (("text", 9),),
    (("text", 2), ("video", 3, 4, 6), ("text", 3), ("image", 2, 2), ("text", 2)),
    (
        *(("text", 2), ("image", 2, 30), ("text", 1), ("image", 4, 4), ("text", 1)),
        *(("image", 10, 6), ("text", 5), ("image", 6, 8), ("text", 1), ("image", 2, 2)),
        ("text", 4),
    ),
)
# Pieces by group and row: the clip's pairs, 1 to 3, lie in two rows of the tower.
SCHEDULE = Schedule(
    0,
    (
        group_of_rows("vision", SHAPES["vision"], ((((0, 1, 3), (2, 4)),),), (1,)),
        group_of_rows("llm", SHAPES["llm"], ((((0, 1), (2,)),),)),
        group_of_rows("vision", SHAPES["vision"], ((((6, 9, 5), (8, 7)),),), (3,)),
        group_of_rows("llm", SHAPES["llm"], ((((3,), ()),),)),
    ),
)


def plan():
    """The tower over two devices, the LLM in three segments over two each: the features of its
    first tap enter the first, those of its second the second."""
    devices = [(first, 2) for first in (0, 2, 4, 6)]
    return _plan({"vision": (0, 3), "llm": (0, 2, 3, 4)}, devices)


def plan_of_processes():
    """The tower and half of the LLM on one device, the other half on another: the second tap and
    the tied head cross over."""
    return _plan({"vision": (0, 3), "llm": (0, 2, 4)}, [(0, 1), (0, 1), (1, 1)])


def _plan(cuts, devices):
    """Segments between the cuts of each module, in order on (first device, ways of a tensor)."""
    segments, submeshes = [], []
    for module, ends in cuts.items():
        for i, (start, stop) in enumerate(pairwise(ends)):
            name = f"{module}{i}"
            first, ways = devices[len(submeshes)]
            submeshes.append(SubmeshPlan(name, first, 1, 1, ways))
            last = stop == ends[-1]
            segments.append(SegmentPlan(name, module, start, stop, name, start == 0, last))
    return Plan(
        "test",
        Layout(
            tuple(submeshes),
            tuple(segments),
            (Bucket.of(SHAPES),),
            edges=edges_of(MODEL),
            tied=("llm",),
        ),
    )

"""A small model with an untied head, random parameters, and the folder that holds them."""

import dataclasses

import jax.numpy as jnp
import pytest

from dflop_jax.contract import edges_of
from dflop_jax.records import Bucket, Layout, Plan, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.weights import ModuleParams, write_folder
from models.composed import PublishedComposition
from models.hf_tensors import conv_layout, linear_layout, patch_layout, unchanged, vector_layout
from models.sizes import DECODERS, VISION, ModelSize
from tests.verify.folders import random_params

DECODER = dataclasses.replace(DECODERS["nano"], tied=False, vocab=96, n_layers=6)
TOWER = dataclasses.replace(VISION["internvit-nano"], qk_norm=True, rms_norm=True, qkv_bias=False)
MODEL = PublishedComposition(ModelSize(DECODER, TOWER, layout="dynamic"), jnp.dtype("float32"))

# The tower over stages and heads; the LLM in two segments, of which one is replicated over data, a
# loop of two rounds.
PLAN = Plan(
    "test",
    Layout(
        (SubmeshPlan("v", 0, 2, 1, 2), SubmeshPlan("a", 4, 1, 1, 2), SubmeshPlan("b", 4, 2, 2, 1)),
        (
            SegmentPlan("v", "vision", 0, 2, "v", True, True),
            SegmentPlan("a", "llm", 0, 2, "a", True, False),
            SegmentPlan("b", "llm", 2, 6, "b", False, True, rounds=2),
        ),
        (
            Bucket.from_shapes(
                {"vision": Shape(2, MODEL.piece_tokens["vision"]), "llm": Shape(1, 64)}
            ),
        ),
        edges=edges_of(MODEL),
        group_size=2,
    ),
)
KERNELS = [linear_layout((6, 4, 3)), linear_layout((4, 3, 6), n_in=2), linear_layout((6, 8)),
           patch_layout((2 * 2 * 3, 8), 2), conv_layout((3, 4, 8))]  # fmt: skip
LAYOUTS = [*KERNELS, vector_layout((4, 3)), vector_layout((8,)), unchanged((8, 6)),
           unchanged((5, 6), leading=1), unchanged((6,), leading=2)]  # fmt: skip


def held(params):
    return [ModuleParams(module, tree) for module, tree in params.items()]


@pytest.fixture(scope="session")
def params():
    return random_params(MODEL, 0)


@pytest.fixture(scope="session")
def folder(params, tmp_path_factory):
    """In several files, with an index."""
    path = tmp_path_factory.mktemp("weights") / "model"
    write_folder(path, MODEL.weights, held(params), max_file_bytes=60_000)
    return path

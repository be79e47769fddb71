"""A run whose ranks hold chunks of both modules, whose pictures go in several groups, and whose
groups share what memory is left: long, without a compile; stopped and resumed, to the bit."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from dflop_jax import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    PlanConfig,
    ScheduleConfig,
    TrainConfig,
)
from dflop_jax.contract import edges_of
from dflop_jax.records import (
    Bucket,
    DataProfile,
    Layout,
    Plan,
    Profile,
    ResidualBytes,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples
from dflop_jax.train import trainer as trainer_module
from dflop_jax.train.trainer import Trainer
from models import qwen3_vl
from models.qwen3_vl_sizes import QWEN3_VL

from ..plans import EDGE, TILE_TOKENS, nano_profile

STEPS = 80
TILES, TEXT = Shape(4, TILE_TOKENS), (Shape(1, 160), Shape(1, 64))
SEGMENTS = (
    SegmentPlan("vision0", "vision", 0, 1, "rank0", True, False, "segment", 1, "none"),
    SegmentPlan("vision1", "vision", 1, 2, "rank1", False, True, "segment", 1, "none"),
    SegmentPlan("llm0", "llm", 0, 2, "rank0", True, False),
    SegmentPlan("llm1", "llm", 2, 4, "rank1", False, True),
)
PLAN = Plan(
    "dip",
    Layout(
        (SubmeshPlan("rank0", 0, 1, 1, 1), SubmeshPlan("rank1", 1, 1, 1, 1)),
        SEGMENTS,
        (
            Bucket.from_shapes({"vision": TILES, "llm": TEXT[0]}),
            Bucket.from_shapes({"vision": TILES, "llm": TEXT[1]}),
        ),
        edges=(EDGE,),
        fan_in=4,
        tied=("llm",),
    ),
    Scheduling(
        residuals=tuple(
            ResidualBytes(s.name, shape, 1.0, 4.0 * (s.module == "vision"))
            for s in SEGMENTS
            for shape in ((TILES,) if s.module == "vision" else TEXT)
        ),
        free_bytes={"rank0": 4.0, "rank1": 4.0},
    ),
)


def fit(run_dir, steps, *, existing="error"):
    jax.devices()
    config = Config(
        model=ModelConfig(factory="tests.small:build"),
        data=DataConfig(n_samples=512, max_tiles=2, max_frames=4, max_tokens=160),
        # By the profile's prices: those of these small programs would be noise.
        plan=PlanConfig(policy="dip", finalists=0),
        train=TrainConfig(steps=steps, global_batch=6, learning_rate=1e-2),
        schedule=ScheduleConfig(correct=False),
        checkpoint=CheckpointConfig(every=50),
        run_dir=str(run_dir),
    )
    trainer = Trainer(config, plan=PLAN, profile=nano_profile(), existing=existing)
    return trainer.fit(), read_metrics(run_dir)


@pytest.fixture(scope="module")
def long_run(compiled_once, tmp_path_factory):
    return fit(tmp_path_factory.mktemp("long") / "run", STEPS)


@pytest.mark.slow
def test_no_compile_in_many_varied_steps(long_run):
    result, rows = long_run
    assert [r["compiles"] for r in rows[1:]] == [0] * (STEPS - 1)
    assert result.compiles_after_warmup == 0
    ran = {label for r in rows for label in r["groups"]}
    tiles = f"vision:{TILES.name}"
    keeping = {f"{tiles} +vision0", f"{tiles} +vision1", f"{tiles} +vision0 +vision1"}
    assert ran <= {tiles, *keeping, *(f"llm:{s.name}" for s in TEXT)}
    assert tiles in ran
    assert ran & keeping
    several = [sum(n for k, n in r["groups"].items() if k.startswith("vision")) for r in rows]
    assert len(set(several)) > 3  # as many groups of pictures as a batch needs
    assert result.losses[-1] < 0.7 * result.losses[0]


STEPS, N = 12, 40


def small(size: str, dtype: str) -> qwen3_vl.Qwen3VL:
    """As few layers as have a tap, since all of them are compiled."""
    nano = QWEN3_VL["qwen3-vl-nano"]
    tower = replace(nano.vision, n_layers=1, deepstack=(0,))
    return qwen3_vl.Qwen3VL(
        replace(nano, decoder=replace(nano.decoder, n_layers=1), vision=tower), jnp.dtype(dtype)
    )


@pytest.mark.slow
def test_no_compile_whatever_the_sizes_and_the_largest_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trainer_module, "write_summary", lambda folder: None)
    model = small("", "float32")
    modules = model.modules.items()
    buckets = (((2, 96), (2, 96)), ((1, 48), (1, 64)))
    plan = Plan(
        "dflop",
        Layout(
            (SubmeshPlan("vision", 0, 1, 1, 1), SubmeshPlan("llm", 1, 1, 1, 1)),
            tuple(SegmentPlan(m, m, 0, it.n_layers, m, True, True) for m, it in modules),
            tuple(Bucket.from_shapes({"vision": Shape(*v), "llm": Shape(*n)}) for v, n in buckets),
            edges=edges_of(model),
            tied=("llm",),
        ),
    )
    config = Config(
        model=ModelConfig(factory=f"{__name__}:small"),
        data=DataConfig(n_samples=N, min_pixels=64, max_tiles=4, max_frames=4, max_tokens=96),
        train=TrainConfig(steps=STEPS, global_batch=6),
        run_dir=str(tmp_path / "run"),
        cache_dir=str(tmp_path / "cache"),
    )
    known = nano_profile().model
    facts = replace(known, n_layers={m: it.n_layers for m, it in modules}, piece_tokens={},
                    edges=plan.layout.edges)  # fmt: skip
    trainer = Trainer(config, plan=plan)
    loads = tuple(trainer.source.load(i) for i in range(N))
    trainer.profile = Profile(facts, DataProfile("scenes", N, loads))
    large = oversize_samples(loads, plan)
    assert 0 < len(large) < N / 2
    assert len({load.tokens("vision") for load in loads}) > 8
    assert any(len(set(load.lengths("vision"))) > 1 for load in loads)
    result, rows = trainer.fit(), read_metrics(tmp_path / "run")
    assert result.compiles_after_warmup == 0
    assert [r["compiles"] for r in rows[1:]] == [0] * (STEPS - 1)
    assert len({r["padding_fraction"]["vision"] for r in rows}) > STEPS / 2
    named = [r.getMessage() for r in caplog.records if "larger than any compiled" in r.getMessage()]
    assert len(named) == len(set(named)) == len(large)  # two epochs show every sample

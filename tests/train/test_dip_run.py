"""A run whose ranks hold chunks of both modules, whose pictures go in several groups, and whose
groups share what memory is left: long, without a compile; stopped and resumed, to the bit."""

import os
import signal

import jax
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
from dflop_jax.records import (
    Bucket,
    Layout,
    Plan,
    ResidualBytes,
    Scheduling,
    SegmentPlan,
    Shape,
    SubmeshPlan,
)
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.train.trainer import Trainer

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


def stop_at(step, monkeypatch):
    """Ask runs to end when they want the schedule of a step."""
    get = ScheduleWorker.get

    def stop(self, wanted):
        if wanted == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return get(self, wanted)

    monkeypatch.setattr(ScheduleWorker, "get", stop)


@pytest.mark.slow
def test_stopped_and_resumed_it_gives_the_same_bits(long_run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(5, patch)
        result, rows = fit(tmp_path / "run", STEPS)
    assert result.preempted
    assert len(rows) < 12
    with monkeypatch.context() as patch:
        stop_at(15, patch)
        _, rows = fit(tmp_path / "run", STEPS, existing="resume")
    assert 12 < len(rows) < STEPS
    assert [r["step"] for r in rows] == list(range(len(rows)))
    assert [r["loss"] for r in rows] == [r["loss"] for r in long_run[1][: len(rows)]]

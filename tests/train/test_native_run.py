"""A run at native resolution: pictures, clips and text of many sizes in a few compiled shapes, and
samples that none of them holds."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from dflop_jax import Config, DataConfig, ModelConfig, TrainConfig
from dflop_jax.contract import edges_of
from dflop_jax.records import (
    Bucket,
    DataProfile,
    Layout,
    Plan,
    Profile,
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

from ..plans import nano_profile

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

"""What a plan promises of a run, against numbers by hand."""

import dataclasses

import pytest

from dflop_jax.config import Config, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.records import DataProfile, Load, Predicted
from dflop_jax.train import step_figures
from dflop_jax.train.run_context import make_run_context
from dflop_jax.train.step_figures import PredictedRun, predict_run
from tests.plans import NANO


@pytest.mark.parametrize(
    "hardware, stated, peak",
    [("a100-80", 0.0, 312e12), ("a100-80", 1e12, 1e12), ("cpu", 0.0, 0.0), ("cpu", 1e9, 1e9)],
)
def test_a_plan_promises_the_time_of_a_run_and_its_rates(monkeypatch, hardware, stated, peak):
    """Batches of 4 of two samples of 10 and 30 tokens, a second each: 80 tokens/s; a vision token
    needs 2e12 FLOPs, one of text 1e12: 4 x (5 x 2 + 20) = 120 TFLOP a step."""
    config = Config(
        model=ModelConfig(size="nano", dtype="bfloat16"),
        plan=PlanConfig(policy="dflop", hardware=hardware, devices=2),
        train=TrainConfig(epochs=2, global_batch=4, peak_flops=stated),
    )
    flops = {"vision": lambda n, _: 2e12 * n, "llm": lambda n, _: 1e12 * n}
    monkeypatch.setattr(step_figures, "needed_flops", lambda *_: flops)
    plan = dataclasses.replace(NANO, predicted=Predicted(makespan_s=1.0))
    loads = Load({"vision": (10,), "llm": (10,)}), Load({"llm": (10, 20)})
    got = predict_run(make_run_context(config), DataProfile("two", 10, loads), plan)
    mfu = 120e12 / (2 * peak) if peak else None
    assert got == PredictedRun(5, 5.0, 80.0, mfu if mfu is None else pytest.approx(mfu))

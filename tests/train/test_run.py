"""A long varied run compiles nothing, and a killed or corrected scheduler changes no loss."""

import os
import signal

import pytest

from dflop_jax import Config, DataConfig, ModelConfig, ScheduleConfig, TrainConfig
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.schedule import worker as schedule_worker
from dflop_jax.train.trainer import Trainer

from ..plans import NANO, bucket, nano_profile

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")

K = 3
STEPS = 14  # of the runs that are compared
MANY = 40  # steps, and as many mixes of samples
PLAN = NANO.with_layout(buckets=(bucket(16, 160), bucket(6, 112), bucket(0, 64)))


def fit(run_dir, steps: int, *, correct: bool = False):
    config = Config(
        model=ModelConfig(factory="tests.small:build"),
        data=DataConfig(n_samples=512, max_tiles=2, max_frames=4, max_tokens=160),
        train=TrainConfig(
            steps=steps, global_batch=8, learning_rate=1e-2, eval_samples=8, eval_every=100
        ),
        schedule=ScheduleConfig(correct=correct),
        run_dir=str(run_dir),
    )
    trainer = Trainer(config, plan=PLAN, profile=nano_profile())
    return trainer.fit(), read_metrics(run_dir)


@pytest.fixture(scope="module")
def sent():
    """Prices that were sent to the worker of a run after its start, in order."""
    sent = []
    update = schedule_worker.ScheduleWorker.update_prices

    def spy(self, prices):
        sent.append(prices)
        return update(self, prices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule_worker.ScheduleWorker, "update_prices", spy)
        yield sent


@pytest.fixture(scope="module")
def undisturbed(quick, sent, tmp_path_factory):
    """The rows of a run that nothing disturbs and nothing corrects."""
    sent.clear()
    _, rows = fit(tmp_path_factory.mktemp("undisturbed") / "run", STEPS)
    assert not sent
    return rows


def test_no_compile_in_many_varied_steps():
    result, rows = fit("run", MANY)
    assert [r["step"] for r in rows] == list(range(MANY))
    assert [r["compiles"] for r in rows[1:]] == [0] * (MANY - 1)
    assert result.compiles_after_warmup == 0
    assert all(len(PLAN.layout.shapes(m)) <= K for m in PLAN.layout.modules)
    shapes = {f"{m}:{s.name}" for m in PLAN.layout.modules for s in PLAN.layout.shapes(m)}
    assert {label for r in rows for label in r["groups"]} <= shapes
    assert all(r["losses"] == {"llm": r["loss"]} for r in rows)
    # Varied data: the padding, hence the mix of buckets and samples, differs from step to step.
    assert len({round(r["padding_fraction"]["llm"], 6) for r in rows}) > MANY / 4
    assert result.losses[-1] < 0.7 * result.losses[0]
    assert result.evaluation is not None
    assert result.evaluation.step == MANY


@pytest.mark.slow
def test_killing_the_scheduler_costs_no_step_and_no_sample(undisturbed, monkeypatch):
    killed = []
    get = schedule_worker.ScheduleWorker.get

    def kill_once(self, step):
        if step == 6 and not killed:
            killed.append(self._child.pid)
            os.kill(self._child.pid, signal.SIGKILL)
        return get(self, step)

    monkeypatch.setattr(schedule_worker.ScheduleWorker, "get", kill_once)
    _, rows = fit("killed", STEPS)
    assert len(killed) == 1
    assert [r["step"] for r in rows] == list(range(STEPS))
    # Every sample of every batch was trained on: equal token counts, equal losses to rounding.
    assert [r["supervised_tokens"] for r in rows] == [r["supervised_tokens"] for r in undisturbed]
    for a, b in zip(rows, undisturbed, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_correction_reaches_the_scheduler_and_changes_no_loss(undisturbed, sent, capsys):
    sent.clear()
    _, rows = fit("corrected", STEPS, correct=True)
    # The made-up profile is far off, so the observed times move the prices.
    assert len(sent) >= 8
    assert sent[-1].programs != sent[0].programs
    said = capsys.readouterr().err
    assert said.count("sampling task times") == 1
    assert said.count("schedules use measured task times") <= 1
    for a, b in zip(rows, undisturbed, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)

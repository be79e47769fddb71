"""What a skipped step was is told by running it again: a fault that passed leaves no trace."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from dflop_jax.cluster.ending import BrokenDevice
from dflop_jax.pipeline.executor import Executor
from dflop_jax.report.run_folder import read_metrics
from dflop_jax.train import device_check
from dflop_jax.train.judge import moved_on
from dflop_jax.train.prepare import Workplace

from .resume_cases import (  # the fixtures come by their names
    CONFIG,
    STEPS,
    _in_a_folder_of_its_own,  # noqa: F401
    essence,
    evaluations,
    fit,
    quick,  # noqa: F401
    steps_saved,
    whole,  # noqa: F401
)

REPLAYS = dataclasses.replace(CONFIG.train, replay_skips=True)


@pytest.fixture
def overflows(monkeypatch):
    """Steps whose gradients are not finite, and how often yet; the steps that were run."""
    left: dict[int, int] = {}
    ran: list[int] = []
    run_step = Executor.run_step

    def run(self, schedule, arrays, scales, **kwargs):
        ran.append(schedule.step)
        if left.get(schedule.step, 0):
            left[schedule.step] -= 1
            scales = {m: s * 1e39 for m, s in scales.items()}
        return run_step(self, schedule, arrays, scales, **kwargs)

    monkeypatch.setattr(Executor, "run_step", run)
    return left, ran


# The first step, one whose next checkpoint is under way when it is known, one that is evaluated
# after, and the last.
@pytest.mark.slow(first=1)
@pytest.mark.parametrize("step", [0, 2, 7, STEPS - 1])
def test_a_fault_that_passes_is_undone(whole, overflows, tmp_path, capsys, step):
    left, ran = overflows
    left[step] = 1
    result = fit(tmp_path / "run", train=REPLAYS)
    said = " ".join(capsys.readouterr().err.split())
    assert f"step {step} is skipped: going back to run it again" in said
    assert f"step {step}, run again from the same state, is well: a transient fault" in said
    assert ran.count(step) == 2
    assert len(result.losses) == result.steps_done == STEPS
    assert essence(tmp_path / "run") == essence(whole)
    assert evaluations(tmp_path / "run") == evaluations(whole)
    assert steps_saved(tmp_path / "run") == steps_saved(whole)


@pytest.mark.slow
def test_what_comes_again_elsewhere_as_well_is_the_data_s(overflows, whole, tmp_path, capsys):
    left, ran = overflows
    left[5] = 9
    fit(tmp_path / "run", train=REPLAYS)
    said = " ".join(capsys.readouterr().err.split())
    assert "step 5, run again from the same state, is skipped again" in said
    assert "all devices compute alike; going back to run it on others" in said
    assert "on others, is skipped as well: the cause is its data or parameters" in said
    assert ran.count(5) == 3  # judged once
    assert [r["step"] for r in read_metrics(tmp_path / "run") if r["skipped"]] == [5]
    # Elsewhere is bit for bit as here.
    losses = [r["loss"] for r in read_metrics(tmp_path / "run")][:6]
    assert losses == [r["loss"] for r in read_metrics(whole)][:6]


@pytest.mark.slow
def test_what_is_well_elsewhere_is_a_device_s(overflows, tmp_path, monkeypatch):
    """Gradients of a step overflow wherever the first device has the plan's first part."""
    left, ran = overflows
    run_step = Executor.run_step

    def run(self, schedule, *args, **kwargs):
        first = next(iter(self.programs.segments.values())).mesh.devices.flat[0]
        left[5] = int(first == jax.devices()[0])
        return run_step(self, schedule, *args, **kwargs)

    monkeypatch.setattr(Executor, "run_step", run)
    is_well = r"step 5, .* on others, is well: one of the devices before"
    with pytest.raises(BrokenDevice, match=is_well) as ended:
        fit(tmp_path / "run", train=REPLAYS)
    assert ended.value.process is None
    assert ran.count(5) == 3


@pytest.mark.parametrize(
    "hosts, by_process, moved",
    [
        ((), [0], [0]),
        ((), [0, 0, 0], [1, 2, 0]),
        (("a", "a"), [0, 0, 1, 1], [2, 3, 0, 1]),
        (("a", "a", "b", "b"), [0, 1, 2, 3], [2, 3, 0, 1]),
        (("a", "a", "b"), [0, 1, 2], [1, 2, 0]),  # hosts differ
        (("a", "b"), [0, 0, 1], [1, 2, 0]),  # and processes
        (("a", "b"), [0, 1, 0, 1], [1, 2, 3, 0]),  # parts are not together
    ],
)
def test_each_place_moves_on_to_the_next(hosts, by_process, moved):
    devices = [SimpleNamespace(id=i, process_index=p) for i, p in enumerate(by_process)]
    place = Workplace(CONFIG, None, devices, None, hosts=hosts)
    assert [d.id for d in moved_on(place)] == moved


@pytest.mark.slow
def test_without_a_checkpoint_it_begins_anew(overflows, tmp_path):
    left, ran = overflows
    left[4] = 1
    checkpoint = dataclasses.replace(CONFIG.checkpoint, every=0)
    fit(tmp_path / "run", train=REPLAYS, checkpoint=checkpoint)
    assert ran.count(0) == ran.count(4) == 2
    assert not [r for r in read_metrics(tmp_path / "run") if r["skipped"]]


def test_it_is_off_unless_asked_for(overflows, tmp_path):
    left, ran = overflows
    left[5] = 1
    fit(tmp_path / "run")
    assert ran == list(range(STEPS))


@pytest.fixture
def wrong(monkeypatch):
    """The calls of the check that give other bits, by their number."""
    calls: set[int] = set()
    n = [0]

    def digest(device):
        n[0] += 1
        is_wrong = device == jax.devices()[1] and (n[0] in calls or -1 in calls)
        return b"wrong" if is_wrong else b"right"

    monkeypatch.setattr(device_check.DeviceCheck.__init__, "__defaults__", (digest,))
    return calls


def test_a_check_names_a_device_and_ends_the_run_where_it_stays(wrong, whole, tmp_path, capsys):
    train = dataclasses.replace(CONFIG.train, check_every=3)
    fit(tmp_path / "well", train=train)
    assert essence(tmp_path / "well") == essence(whole)
    wrong.add(-1)
    with pytest.raises(BrokenDevice, match=r"step 3: device 1 of .* \(persistent\)") as ended:
        fit(tmp_path / "run", train=train)
    assert ended.value.process == 0


def test_a_device_that_was_wrong_once_is_said(wrong, whole, tmp_path, capsys):
    wrong.add(len(jax.devices()) + 2)  # after the call that compiles, the second of the first three
    fit(tmp_path / "run", train=dataclasses.replace(CONFIG.train, check_every=3))
    said = " ".join(capsys.readouterr().err.split())
    assert "gave other bits than the rest (transient); steps since the last check" in said
    assert essence(tmp_path / "run") == essence(whole)

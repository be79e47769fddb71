"""Scalars in TensorBoard's files and in W&B: every step once, over restarts too."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from dflop_jax.config import Config, TrainConfig
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.trackers import check_trackers, open_trackers
from dflop_jax.train.callbacks import Evaluation

from .runs import make_row

CONFIG = Config(train=TrainConfig(tensorboard=True))
RATES = {"llm": 1e-3, "vision": 2e-6}


def events_of(folder) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, as TensorBoard shows them: the start of a session at a step voids what
    was seen of it and later ones."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    seen: list[tuple[str, int, float]] = []
    for file in sorted((folder / "tensorboard").iterdir()):
        assert "tfevents" in file.name
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == event.session_log.START:
                seen = [entry for entry in seen if entry[1] < event.step]
            seen += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
    found: dict[str, dict[int, float]] = {}
    for tag, step, value in seen:
        assert step not in found.setdefault(tag, {}), f"{tag} twice at {step}"
        found[tag][step] = value
    return found


def tracked(path, rows, start=0, *, existing="error", evaluations=(), config=CONFIG):
    with RunFolder(path, existing=existing) as run:
        if existing == "resume":
            run.restart(start)
        run.trackers = open_trackers(config, run.path, start)
        for step in rows:
            run.append(make_row(step, learning_rates=RATES, mfu=0.3))
            if step + 1 in evaluations:
                run.append_evaluation(Evaluation(step + 1, 2.0 + step, 0.5))


def test_every_scalar_of_every_step(tmp_path):
    tracked(tmp_path, range(3), evaluations=(2,))
    found = events_of(tmp_path)
    rows = [make_row(k, learning_rates=RATES, mfu=0.3) for k in range(3)]
    tags = ["loss", "grad_norm", "step_s", "tokens_per_s", "flops_per_s", "mfu"]
    tags += [f"learning_rates/{part}" for part in RATES] + ["busy_fraction/enc"]
    tags += ["busy_fraction/llm", "padding_fraction/vision", "padding_fraction/llm"]
    for tag in tags:
        name, _, key = tag.partition("/")
        values = [getattr(row, name)[key] if key else getattr(row, name) for row in rows]
        assert found.pop(tag) == pytest.approx(dict(enumerate(values)))
    # The evaluation after two steps stands at the second one.
    assert found == {"held_out/loss": {1: 3.0}, "held_out/accuracy": {1: 0.5}}
    tracked(tmp_path, range(1), existing="overwrite")
    assert set(events_of(tmp_path)["loss"]) == {0}


@pytest.mark.parametrize("start", [0, 4])
def test_a_resumed_run_has_each_step_once(tmp_path, start):
    tracked(tmp_path, range(6), evaluations=(2, 4, 6))
    with RunFolder(tmp_path, existing="resume") as run:
        run.restart(start)
        run.trackers = open_trackers(CONFIG, run.path, start)
        if start == 4:  # it is due, and done again since the run may have ended before it
            run.append_evaluation(Evaluation(4, 5.0, 0.5))
        for step in range(start, 8):
            run.append(make_row(step, loss=100.0 + step))
            if (step + 1) % 2 == 0:
                run.append_evaluation(Evaluation(step + 1, 2.0 + step, 0.5))
    found = events_of(tmp_path)
    old = {k: make_row(k).loss for k in range(start)}
    assert found["loss"] == pytest.approx(old | {k: 100.0 + k for k in range(start, 8)})
    assert found["held_out/loss"] == {1: 3.0, 3: 5.0, 5: 7.0, 7: 9.0}


@pytest.mark.parametrize(
    "train, package",
    [({"tensorboard": True}, "tensorboardX"), ({"wandb_project": "mine"}, "wandb")],
)
def test_a_missing_package_is_named_with_its_command(monkeypatch, train, package):
    monkeypatch.setitem(sys.modules, package, None)
    config = Config(train=TrainConfig(**train))
    with pytest.raises(ValueError, match=f"pip install {package}$") as failed:
        check_trackers(config)
    assert "\n" not in str(failed.value)
    assert next(iter(train)) in str(failed.value)


# ---- W&B ----


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, whose runs keep what they are given by step; what comes late is
    dropped, as W&B does."""

    def init(**kwargs):
        stub.calls.append(kwargs)
        return stub.runs.setdefault(kwargs["id"], make_run())

    def make_run():
        run = SimpleNamespace(logged={}, finish=Mock())

        def log(scalars, step):
            if step >= max(run.logged, default=0):
                run.logged.setdefault(step, {}).update(scalars)

        run.log = log
        return run

    stub = SimpleNamespace(runs={}, calls=[], init=init)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_wandb_gets_the_same_scalars_and_continues_its_run(wandb, tmp_path):
    own = {"wandb_entity": "us", "wandb_name": "a", "wandb_tags": ("b",)}
    config = Config(train=TrainConfig(wandb_project="mine", **own), run_dir=str(tmp_path))
    tracked(tmp_path, range(4), evaluations=(4,), config=config)
    tracked(tmp_path, range(2, 6), 2, existing="resume", evaluations=(6,), config=config)
    (run,) = wandb.runs.values()
    assert run.finish.call_count == 2
    assert sorted(run.logged) == list(range(6))
    assert run.logged[5]["loss"] == make_row(5).loss
    assert run.logged[5]["learning_rates/vision"] == 2e-6
    assert [step for step in run.logged if "held_out/loss" in run.logged[step]] == [3, 5]
    for call in wandb.calls:
        assert (call["project"], call["resume"], call["dir"]) == ("mine", "allow", str(tmp_path))
        assert call["config"]["train"]["wandb_project"] == "mine"
        assert (call["entity"], call["name"], call["tags"]) == ("us", "a", ("b",))
    tracked(tmp_path, range(1), existing="overwrite", config=config)
    assert len(wandb.runs) == 2

"""Resuming from damaged checkpoints, and the parts that resuming is made of."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import msgspec
import pytest

from dflop_jax import Config, PlanConfig, TrainConfig
from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.checkpoint.format import OtherVersion, decode_manifest, encode_manifest
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.distributed.process_exit import FAILED, RunFailed, exit_code_of
from dflop_jax.records import Price, PriceList, Prices, ProgramId, Shape
from dflop_jax.train.loop import TrainLoop
from dflop_jax.train.resume import (
    RunState,
    flag_settings,
    is_other_device_count,
    read_state,
    reuse_state,
)

from ..plans import NANO, bucket, nano_profile
from .resume_cases import (
    as_killed,
    assert_as_whole,
    copy_of,
    damage,
    data_file,
    essence,
    fit,
    manifest,
    refused,
    steps_saved,
)

pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")


def warnings_of(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("dflop_jax.train")]


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("what", [manifest, data_file])
def test_a_damaged_checkpoint_is_passed_over(whole, caplog, what):
    folder = as_killed(whole, saved=9, rows=11)
    damage(what(folder, 9))
    fit(folder, "resume")
    warning, aside = warnings_of(caplog)
    assert "checkpoint of step 9 is damaged, using an older one" in warning
    assert what(folder, 9).name in warning
    assert "checkpoint of step 9 stays as run/checkpoints/00000009.damaged until" in aside
    assert_as_whole(folder, whole)
    # Step 9 was saved anew, and only then the damaged one removed.
    assert steps_saved(folder) == (12, 9, 6, 3)
    assert len([*(folder / "checkpoints").iterdir()]) == 4


class Stopped(BaseException):
    """As a kill."""


@pytest.fixture
def stops_before_its_steps(monkeypatch):
    def run(self, stack):
        raise Stopped

    monkeypatch.setattr(TrainLoop, "run", run)


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir()}


def written_by_another_version(folder: Path, step: int, **changes) -> None:
    """The same checkpoint with another run state, sound to the last checksum."""
    store = CheckpointStore(folder / "checkpoints")
    reader = store.open(step)
    manifest_of = decode_manifest(manifest(folder, step).read_bytes())
    data = encode_manifest(
        dataclasses.replace(manifest_of, run_state={**reader.run_state, **changes})
    )
    manifest(folder, step).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    (manifest(folder, step).parent / "COMMITTED").write_text(f"sha256 {digest} manifest.json\n")


def test_a_checkpoint_of_another_version_is_named_and_kept(whole, caplog, stops_before_its_steps):
    folder = as_killed(whole, saved=9, rows=11)
    written_by_another_version(folder, 9, version=77)
    held = contents(folder / "checkpoints/00000009")
    with pytest.raises(Stopped):
        fit(folder, "resume")
    warning, aside = warnings_of(caplog)
    assert "step 9 is of another version of this program, using an older one" in warning
    assert "version 77" in warning
    assert "00000009.other-version" in aside
    assert contents(folder / "checkpoints/00000009.other-version") == held
    assert steps_saved(folder) == (6, 3)


@pytest.mark.parametrize("damaged", [(), (3,)])
def test_what_another_version_reads_is_not_to_be_overwritten(whole, damaged):
    folder = as_killed(whole, saved=6, rows=7)
    for step in (3, 6):
        written_by_another_version(folder, step, version=77)
    for step in damaged:
        damage(data_file(folder, step))
        damage(manifest(folder, step))
    said = refused(folder)
    assert "resume with the one that wrote them" in said
    assert "overwrite" not in said
    assert steps_saved(folder) == (6, 3)


@pytest.mark.parametrize("what", [manifest, data_file])
def test_damage_everywhere_is_refused(whole, caplog, what):
    folder = as_killed(whole, saved=6, rows=7)
    rows = essence(folder)
    for step in (3, 6):
        damage(what(folder, step))
    assert "no checkpoint is complete; start again with --overwrite" in refused(folder)
    assert [w.split(",")[0] for w in warnings_of(caplog)] == [
        f"checkpoint of step {step} is damaged" for step in (6, 3)
    ]
    assert steps_saved(folder) == (6, 3)
    assert essence(folder)[:6] == rows[:6]


def test_what_cannot_be_written_at_the_end_is_an_error(whole, monkeypatch):
    """Once all is done, which is no bad input: exit code 1."""
    folder = copy_of(whole)

    def fails(self):
        self.error_text = "No space left on device"

    monkeypatch.setattr(Checkpointer, "wait", fails)
    with pytest.raises(RunFailed, match="not saved: No space left on device") as error:
        fit(folder, "resume")
    assert exit_code_of(error.value) == FAILED
    assert "\n" not in str(error.value)


PROFILE = nano_profile()
PRICES = PriceList.from_prices(Prices({ProgramId("l0", Shape(1, 160), "forward"): Price(1.0)}))
DEVICES = {"processes": 2, "devices": 8, "kind of device": "cpu", "memory of a device": 100,
           "frozen parts": "none"}  # fmt: skip
CONFIG = Config(plan=PlanConfig(buckets=2, zero="1"), train=TrainConfig(remat="auto"))


def settings(config: Config = CONFIG, **devices) -> dict:
    return {**flag_settings(config), **DEVICES, **devices}


STORED = RunState(9, {"step": 9}, NANO, PROFILE, PRICES, settings())


def changed(section: str, **values) -> Config:
    return dataclasses.replace(
        CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **values)}
    )


@pytest.mark.parametrize(
    "now",
    [
        settings(),
        settings(changed("train", steps=7, eval_samples=3, learning_rate=1.0, profile_steps="1:2")),
        settings(changed("checkpoint", every=1, keep=9)),
        settings(changed("data", workers=7, path="elsewhere", root=("elsewhere",))),
        settings(changed("plan", redecide_every=5, devices=8)),
        settings(changed("schedule", work=3, correct=False, ahead=9)),
        settings(dataclasses.replace(CONFIG, run_dir="elsewhere", cache_dir="elsewhere")),
        # jax's limit of a device's memory varies by some bytes.
        settings(**{"memory of a device": 99}),
    ],
)
def test_settings_that_decide_no_plan_keep_the_whole_state(now):
    assert reuse_state(STORED, now, None, None) == (STORED, "")


@pytest.mark.parametrize(
    "now, changes, keeps_profile",
    [
        (settings(changed("plan", buckets=1)), "plan.buckets 1 (was 2)", True),
        (settings(changed("plan", buckets=1, zero="3")),
         "plan.buckets 1 (was 2); plan.zero 3 (was 1)", True),
        (settings(changed("train", remat="layers")), "train.remat layers (was auto)", True),
        (settings(**{"memory of a device": 50}), "memory of a device 50 (was 100)", True),
        (settings(changed("plan", max_model=4)), "plan.max_model 4 (was 0)", False),
        (settings(changed("data", max_tokens=99)), "data.max_tokens 99 (was 1024)", False),
        (settings(changed("data", tokenizer="t")), "data.tokenizer t (was empty)", False),
        (settings(**{"kind of device": "h100"}), "kind of device h100 (was cpu)", False),
    ],
)  # fmt: skip
def test_settings_that_decide_plans_are_named_and_planned_for(now, changes, keeps_profile):
    state, message = reuse_state(STORED, now, None, None)
    assert (state.plan, state.prices, state.step) == (None, None, 9)
    assert state.profile == (PROFILE if keeps_profile else None)
    assert message == f"{changes}: planning again"


@pytest.mark.parametrize(
    "now, factor",
    [(settings(devices=4), 0.5), (settings(devices=16), 2.0), (settings(processes=1), 1.0)],
)
def test_a_measured_profile_serves_every_number_of_devices(now, factor):
    state, _ = reuse_state(STORED, now, None, None)
    assert state.plan is None
    assert is_other_device_count(STORED.settings, now)
    model = state.profile.model
    assert model.concurrency == PROFILE.model.concurrency * factor
    assert dataclasses.replace(model, concurrency=PROFILE.model.concurrency) == PROFILE.model
    assert state.profile.data == PROFILE.data
    # Kinds of devices do not serve each other, whatever their number.
    other, _ = reuse_state(STORED, {**now, "kind of device": "h100"}, None, None)
    assert other.profile is None


def test_given_plan_and_profile_go_before_the_stored_ones():
    other, profile = NANO.with_layout(buckets=(bucket(9, 99),)), nano_profile()
    now = settings(changed("plan", max_model=4))

    def reused(now, plan, profile):
        state, _ = reuse_state(STORED, now, plan, profile)
        return state.plan, state.profile, state.prices

    assert reused(settings(), NANO, profile) == (NANO, profile, PRICES)
    assert reused(now, NANO, profile) == (NANO, profile, None)
    assert reused(settings(), other, None) == (other, PROFILE, None)
    assert reused(now, None, profile) == (None, profile, None)


def test_other_trained_parts_are_refused_before_anything_is_planned():
    now = settings(changed("plan", buckets=1), **{"frozen parts": "vision"})
    with pytest.raises(ValueError, match="trained with none frozen, this run with vision"):
        reuse_state(STORED, now, None, None)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": 3}, "its state has version 3, this program reads 5"),
        ({"settings": 3}, "another version of this program: .*settings"),
    ],
)
def test_a_state_of_another_version_is_refused(change, message):
    with pytest.raises(OtherVersion, match=message):
        read_state({**msgspec.to_builtins(STORED), **change})

"""What a resumed run goes on with, as a function of what its plan was chosen under, and of now."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from dflop_jax import Config, PlanConfig, TrainConfig
from dflop_jax.checkpoint.format import OtherVersion
from dflop_jax.config import fields
from dflop_jax.records import Price, PriceList, Prices, ProgramId, Shape
from dflop_jax.train.resume import (
    Continued,
    Meta,
    changed_flags,
    continued,
    flags_that_plan,
    read_meta,
    trained_under,
)

from ..plans import NANO, bucket, nano_profile

PROFILE = nano_profile()
PRICES = Prices({ProgramId("l0", Shape(1, 160), "forward"): Price(1.0)})
DEVICES = {
    "processes": 2,
    "devices": 8,
    "kind of device": "cpu",
    "memory of a device": 100,
    "frozen parts": "none",
}
CONFIG = Config(plan=PlanConfig(buckets=2, zero="1"), train=TrainConfig(remat="auto"))


def under(config: Config = CONFIG, **devices) -> dict:
    return {**flags_that_plan(config), **DEVICES, **devices}


META = Meta(9, {"step": 9}, NANO, PROFILE, PriceList.from_prices(PRICES), under())
ALL = Continued(NANO, PROFILE, PRICES)


def changed(section: str, **values) -> Config:
    return dataclasses.replace(
        CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **values)}
    )


def test_nothing_that_decides_a_plan_differs():
    assert continued(META, under(), None, None) == ALL
    for config in (
        changed("train", steps=7, eval_samples=3, learning_rate=1.0, profile_steps="1:2"),
        changed("checkpoint", every=1, keep=9),
        changed("data", workers=7, path="elsewhere", root=("elsewhere",)),
        changed("plan", redecide_every=5, devices=8),
        changed("schedule", work=3, correct=False, ahead=9),
        dataclasses.replace(CONFIG, run_dir="elsewhere", cache_dir="elsewhere"),
    ):
        assert continued(META, under(config), None, None) == ALL
    # What jax takes of a device is not the same to the byte.
    assert continued(META, under(**{"memory of a device": 99}), None, None) == ALL


@pytest.mark.parametrize(
    "now, says, profile_serves",
    [
        (under(changed("plan", buckets=1)), "plan.buckets was 2, now 1", True),
        (
            under(changed("plan", buckets=1, zero="3")),
            "plan.buckets was 2, now 1; plan.zero was 1, now 3",
            True,
        ),
        (under(changed("plan", policy="orch")), "plan.policy was auto, now orch", True),
        (under(changed("plan", memory_bytes=5e9)), "plan.memory_bytes was 0.0, now 5000000000.0",
         True),
        (under(changed("train", remat="layers")), "train.remat was auto, now layers", True),
        (under(**{"memory of a device": 50}), "memory of a device was 100, now 50", True),
        (under(changed("plan", max_model=4)), "plan.max_model was 0, now 4", False),
        (under(changed("data", max_tokens=99)), "data.max_tokens was 1024, now 99", False),
        (under(changed("model", dtype="bfloat16")), "model.dtype was float32, now bfloat16", False),
        (under(changed("data", tokenizer="t")), "data.tokenizer was empty, now t", False),
        (under(**{"kind of device": "h100"}), "kind of device was cpu, now h100", False),
    ],
)  # fmt: skip
def test_what_differs_is_named_and_planned_for(now, says, profile_serves):
    got = continued(META, now, None, None)
    assert got == Continued(
        None, PROFILE if profile_serves else None, says=f"{says}: planning anew"
    )


@pytest.mark.parametrize(
    "now, share",
    [(under(devices=4), 0.5), (under(devices=16), 2.0), (under(processes=1), 1.0)],
)
def test_what_was_measured_serves_every_number_of_devices(now, share):
    got = continued(META, now, None, None)
    assert (got.plan, got.recounted) == (None, True)
    model = got.profile.model
    assert model.concurrency == PROFILE.model.concurrency * share
    assert dataclasses.replace(model, concurrency=PROFILE.model.concurrency) == PROFILE.model
    assert got.profile.data == PROFILE.data
    assert got.says.endswith("planning anew")
    # Kinds of devices do not serve each other, whatever their number.
    other = {**now, "kind of device": "h100"}
    assert continued(META, other, None, None).profile is None


def test_what_is_given_goes_first():
    other, profile = NANO.with_layout(buckets=(bucket(9, 99),)), nano_profile()
    now = under(changed("plan", max_model=4))
    assert continued(META, under(), NANO, profile) == Continued(NANO, profile, PRICES)
    assert continued(META, now, NANO, profile) == Continued(NANO, profile)
    assert continued(META, under(), other, None) == Continued(other, PROFILE)
    assert continued(META, now, None, profile).profile is profile


def test_other_trained_parts_are_refused_before_anything_is_planned():
    now = under(changed("plan", buckets=1), **{"frozen parts": "vision"})
    with pytest.raises(ValueError, match="trained with none frozen, this run with vision"):
        continued(META, now, None, None)


def test_every_flag_of_plans_decides_or_is_named():
    """A new flag of plan.* makes a resumed run plan anew, unless meta.py says why not."""
    flags = flags_that_plan(CONFIG)
    names = {leaf.name for leaf in fields()}
    assert flags.keys() <= names
    idle = {n for n in names if n.startswith("plan.")} - flags.keys()
    assert idle == {"plan.devices", "plan.hardware", "plan.redecide_every"}
    assert flags["train.global_batch"] == CONFIG.train.global_batch


def test_changed_flags_are_named_with_both_values():
    meta = dataclasses.replace(META, trained_under=trained_under(CONFIG))
    meta = read_meta(msgspec.json.decode(msgspec.json.encode(meta)))
    assert changed_flags(meta, CONFIG) == ""
    assert changed_flags(meta, changed("plan", buckets=1)) == ""
    assert changed_flags(meta, changed("data", root=("a", "b"))) == "data.root a,b (was empty)"
    now = changed("train", weight_decay=0.0, steps=7)
    assert changed_flags(meta, now) == "train.steps 7 (was 100), train.weight_decay 0.0 (was 0.01)"
    assert changed_flags(META, now) == ""  # of before checkpoints had them


# ---- versions ----


def test_meta_comes_back():
    record = msgspec.json.decode(msgspec.json.encode(META))
    assert read_meta(record) == META


@pytest.mark.parametrize(
    "change, says",
    [
        ({"version": 4}, "its state has version 4, this program reads 3"),
        ({"version": "new"}, "its state has version new"),
        ({"plan": {"policy": 7}}, "another version of this program: .*plan.policy"),
        ({"planned_under": 3}, "another version of this program: .*planned_under"),
    ],
)
def test_another_version_is_named(change, says):
    with pytest.raises(OtherVersion, match=says):
        read_meta({**msgspec.to_builtins(META), **change})
    with pytest.raises(OtherVersion, match="its state has version None"):
        read_meta({"step": 1})

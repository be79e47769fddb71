"""What a checkpoint keeps beside arrays, and what of it a resumed run goes on with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from dflop_jax.checkpoint.format import OtherVersion
from dflop_jax.config import Config, fields
from dflop_jax.data.media.limits import Limits
from dflop_jax.records import Plan, PriceList, Prices, Profile
from dflop_jax.schedule.learnt import Learnt
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.skips import Skips

# Of `Meta`. 1 had no number, and of `planned_under` three values only; in 1 and 2 prices had one
# order of features for all modules: pairs, and windows of three sizes.
VERSION = 3
PROCESSES, DEVICES = "processes", "devices"  # of `planned_under`: what may be another number
_KIND, _MEMORY, _FROZEN = "kind of device", "memory of a device", "frozen parts"
_COUNTS = {PROCESSES, DEVICES}
# Flags of plan.* that say where, or when, and not which plan is the best.
_NO_CHOICE = {"plan.devices", "plan.hardware", "plan.redecide_every"}
_MORE_FLAGS = ("train.global_batch", "train.remat")
_PROFILED_FLAGS = (
    "plan.max_model",
    "plan.profile_samples",
    "model.dtype",
    "model.attention_kernel",
    "data.tokenizer",
    *(f"data.{name}" for name in vars(Limits())),
)
_PROFILED = {*_PROFILED_FLAGS, _KIND}
# What a checkpoint may say of flags that now are 0 where nobody gave them: then nobody did either.
_WITHOUT = {"plan.max_model": 2, "plan.max_stage": 4, "plan.max_microbatches": 16}
# Share by which a device's memory may differ from that of the run before: what jax may take depends
# a little on what else was there when it began, and plans leave as much free.
_MEMORY_TOLERANCE = 0.05


@dataclass(frozen=True)
class Meta:
    """What a checkpoint keeps beside arrays.

    Attributes:
      loader: see `Loader.state`.
      prices: that batches are scheduled by.
      planned_under: what the plan was chosen under, by name; see `planned_under`.
      trained_under: the flags of model, data and training; see `trained_under`.
      learnt: corrections of the prices, where they are corrected.
      skips: of the updates that were left out.
    """

    step: int
    loader: dict[str, Any]
    plan: Plan
    profile: Profile
    prices: PriceList
    planned_under: dict[str, Any] = field(default_factory=dict)
    learnt: Learnt | None = None
    skips: Skips = field(default_factory=Skips)
    trained_under: dict[str, str] = field(default_factory=dict)
    version: int = VERSION


def read_meta(record: Mapping[str, Any]) -> Meta:
    """The reverse of `msgspec.to_builtins` of a `Meta`, of this or an older version.

    Raises:
      OtherVersion: of a version that this program does not read.
    """
    version = record.get("version", 1)
    if version not in range(1, VERSION + 1):
        raise OtherVersion(f"its state has version {version}, this program reads 1 to {VERSION}")
    under = record.get("planned_under")
    if version == 1:
        names = {"plan.policy": "policy", PROCESSES: "processes", DEVICES: "devices"}
        under = {name: record[key] for name, key in names.items() if key in record}
    try:
        meta = msgspec.convert({**record, "version": version, "planned_under": under}, Meta)
        return meta if version == VERSION else replace(meta, prices=_of_pairs(meta.prices))
    except msgspec.ValidationError as e:  # what the checksums cover is as it was written
        raise OtherVersion(f"its state is of another version of this program: {e}") from None


def _of_pairs(prices: PriceList) -> PriceList:
    """Prices of before version 3, which had content of pairs first."""
    programs = []
    for program, price in prices.programs:
        if any(price.content_s[1:]):
            raise OtherVersion("its prices of windows are of another version of this program")
        programs.append((program, replace(price, content_s=price.content_s[:1])))
    return replace(prices, programs=tuple(programs))


def planned_under(place: Workplace) -> dict[str, Any]:
    """What a plan follows from, by name, as JSON has it: the flags that decide between plans, and
    the devices."""
    values = flags_that_plan(place.config)
    values[PROCESSES], values[DEVICES] = place.peers.count, len(place.devices)
    values[_KIND] = place.devices[0].device_kind
    values[_MEMORY] = place.bytes_limit
    values[_FROZEN] = ", ".join(sorted(place.trained.frozen)) or "none"
    return values


def frozen_parts(record: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The parts that were frozen, as a checkpoint's record of a `Meta` says; None: it does not.

    Raises:
      OtherVersion: see `read_meta`.
    """
    frozen = read_meta(record).planned_under.get(_FROZEN)
    return frozen if frozen is None else tuple(frozen.split(", "))


def flags_that_plan(config: Config) -> dict[str, Any]:
    """The flags that decide between plans, by dotted name."""
    return {
        leaf.name: msgspec.to_builtins(leaf.value(config))
        for leaf in fields()
        if (leaf.name.startswith("plan.") and leaf.name not in _NO_CHOICE)
        or leaf.name in (*_MORE_FLAGS, *_PROFILED_FLAGS)
    }


def trained_under(config: Config) -> dict[str, str]:
    """The flags of model, data and training, by dotted name, as text."""
    leaves = (leaf for leaf in fields() if leaf.name.startswith(("model.", "data.", "train.")))
    return {leaf.name: _text(leaf.value(config)) for leaf in leaves}


def changed_flags(meta: Meta, config: Config) -> str:
    """Name the flags under which a run goes on that differ from those of its checkpoint, with both
    values; "" for none."""
    then, now = meta.trained_under, trained_under(config)
    changed = (name for name in now if name in then and now[name] != then[name])
    return ", ".join(f"{name} {now[name]} (was {then[name]})" for name in changed)


@dataclass(frozen=True)
class Continued:
    """What a run goes on with; None is to be made anew. `says` is for the log, "" is nothing.
    `recounted`: the run had other numbers of devices or processes."""

    plan: Plan | None
    profile: Profile | None
    prices: Prices | None = None
    says: str = ""
    recounted: bool = False


def continued(
    meta: Meta, now: Mapping[str, Any], plan: Plan | None, profile: Profile | None
) -> Continued:
    """What of a checkpoint still serves: its plan and prices where nothing that decides between
    plans differs now, its profile where nothing differs that it was measured under; numbers of
    devices and processes may. A plan or a profile that is given goes before the checkpoint's.

    Raises:
      ValueError: other parts train now.
    """
    then = meta.planned_under
    changed = [n for n in now if n in then and not _same_value(n, then[n], now[n])]
    if _FROZEN in changed:
        raise ValueError(
            f"the checkpoint was trained with {then[_FROZEN]} frozen, this run with {now[_FROZEN]}:"
            " it is of another model or choice of frozen parts; give the same train.stage, "
            "train.freeze and train.lora_rank, or start a new run"
        )
    other_count = bool(_COUNTS.intersection(changed))
    if profile is None and not _PROFILED.intersection(changed):
        profile = meta.profile
        if DEVICES in changed:
            profile = for_devices(profile, then[DEVICES], now[DEVICES])
    if plan is not None:
        same = plan == meta.plan and not changed
        prices = meta.prices.prices if same else None
        return Continued(plan, profile, prices, recounted=other_count)
    if changed:
        says = "; ".join(f"{n} was {_text(then[n])}, now {_text(now[n])}" for n in changed)
        return Continued(None, profile, says=f"{says}: planning anew", recounted=other_count)
    says = ""
    if meta.version == 1:
        says = (
            "the checkpoint is of an older version, which does not say under which flags its plan "
            "was chosen: they are not compared, the plan stays"
        )
    return Continued(meta.plan, profile, meta.prices.prices, says)


def for_devices(profile: Profile, then: int, now: int) -> Profile:
    """A profile that was measured with `then` devices, for `now` of the same: layers take what they
    took, and of `now` devices as large a share computes at once."""
    model = profile.model
    at_once = min(float(now), model.concurrency * now / then)
    return replace(profile, model=replace(model, concurrency=at_once))


def _same_value(name: str, then: Any, now: Any) -> bool:
    """Whether what a plan was made under is what it would be made under now, of one name."""
    if name == _MEMORY:
        return math.isclose(then, now, rel_tol=_MEMORY_TOLERANCE)
    return bool(then == now or (now == 0 and then == _WITHOUT.get(name)))


def _text(value: Any) -> str:
    return (",".join(value) if isinstance(value, tuple) else str(value)) or "empty"

"""What a checkpoint keeps beside arrays, how one is found and restored, all processes together, and
what of it a resumed run goes on with."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.checkpoint.store import (
    DAMAGED,
    OTHER_VERSION,
    PASSED_OVER,
    CheckpointReader,
    CheckpointStore,
    CorruptCheckpoint,
    OtherVersion,
)
from dflop_jax.config import Config, fields
from dflop_jax.data.media.limits import Limits
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.records import Plan, PriceList, Prices, Profile
from dflop_jax.schedule.correction import CorrectionState
from dflop_jax.train.run_context import RunContext
from dflop_jax.train.skipped_steps import SkippedSteps

log = logging.getLogger(__name__)
_WORDS = {
    DAMAGED: "is damaged, using an older one",
    OTHER_VERSION: "is of another version of this program, using an older one",
}
_NONE = {
    DAMAGED: "no checkpoint is whole; start again with --overwrite",
    OTHER_VERSION: "this version of the program reads none of the checkpoints; resume by the one "
    "that wrote them, or choose another --run_dir",
}
VERSION = 3  # of `Meta`
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
    learnt: CorrectionState | None = None
    skips: SkippedSteps = field(default_factory=SkippedSteps)
    trained_under: dict[str, str] = field(default_factory=dict)
    version: int = VERSION


def read_meta(record: Mapping[str, Any]) -> Meta:
    """The reverse of `msgspec.to_builtins` of a `Meta`.

    Raises:
      OtherVersion: of a version that this program does not read.
    """
    if (version := record.get("version")) != VERSION:
        raise OtherVersion(f"its state has version {version}, this program reads {VERSION}")
    try:
        return msgspec.convert(record, Meta)
    except msgspec.ValidationError as e:  # what the checksums cover is as it was written
        raise OtherVersion(f"its state is of another version of this program: {e}") from None


def planned_under(context: RunContext) -> dict[str, Any]:
    """What a plan follows from, by name, as JSON has it: the flags that decide between plans, and
    the devices."""
    values = flags_that_plan(context.config)
    values[PROCESSES], values[DEVICES] = context.peers.n_processes, len(context.devices)
    values[_KIND] = context.devices[0].device_kind
    values[_MEMORY] = context.bytes_limit
    values[_FROZEN] = ", ".join(sorted(context.trained.frozen)) or "none"
    return values


def frozen_parts(record: Mapping[str, Any]) -> list[str]:
    """The parts that were frozen, as a checkpoint's record of a `Meta` says.

    Raises:
      OtherVersion: see `read_meta`.
    """
    return read_meta(record).planned_under[_FROZEN].split(", ")


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
    changed = [n for n in now if n in then and now[n] != then[n]]
    if _MEMORY in changed and isclose(then[_MEMORY], now[_MEMORY], rel_tol=_MEMORY_TOLERANCE):
        changed.remove(_MEMORY)
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
    return Continued(meta.plan, profile, meta.prices.prices)


def for_devices(profile: Profile, then: int, now: int) -> Profile:
    """A profile that was measured with `then` devices, for `now` of the same: layers take what they
    took, and of `now` devices as large a share computes at once."""
    model = profile.model
    at_once = min(float(now), model.concurrency * now / then)
    return replace(profile, model=replace(model, concurrency=at_once))


def _text(value: Any) -> str:
    return (",".join(value) if isinstance(value, tuple) else str(value)) or "empty"


@dataclass(frozen=True)
class Resume:
    """How a run goes on.

    Attributes:
      at: the step whose checkpoint is resumed in place of the newest; newer ones are set aside.
      reset_optimizer: take parameters and data only; the optimizer, which may be another one,
        begins anew.
    """

    at: int | None = None
    reset_optimizer: bool = False


@dataclass(frozen=True)
class Unreadable:
    """A checkpoint that some process cannot read, or that is passed over: why it is set aside, and
    what was met."""

    step: int
    why: str
    met: str


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to continue from, open on this process; the newer ones that are `unreadable`."""

    state: Meta
    reader: CheckpointReader
    unreadable: tuple[Unreadable, ...] = ()


def find_checkpoint(
    folder: Path,
    peers: ProcessGroup,
    unreadable: tuple[Unreadable, ...] = (),
    at: int | None = None,
) -> Resumed | None:
    """Return the newest checkpoint that every process can open, older than those known to be
    `unreadable`; None if there is none at all. Others are named and left as they are. Where a step
    `at` is asked for, newer ones are passed over.

    Raises:
      ValueError: none of those that are there can be read, or there is none of step `at`.
      StorageError: the folder cannot be read.
    """
    store = CheckpointStore(folder)
    below = min((u.step for u in unreadable), default=None)
    steps = [s for s in store.steps() if below is None or s < below] if peers.is_primary else []
    key = f"checkpoints/{below}"
    steps = peers.broadcast(key, steps, list[int])
    if at is not None:
        if at not in steps:
            raise ValueError(store.describe_missing_step(at, steps))
        newer = [Unreadable(s, PASSED_OVER, "") for s in steps if s > at]
        unreadable, steps = (*unreadable, *newer), [s for s in steps if s <= at]
    for step in steps:
        resumed, trouble = None, None
        try:
            reader = store.open(step)
            resumed = Resumed(read_meta(reader.run_state), reader, unreadable)
        except CorruptCheckpoint as e:
            trouble = Unreadable(step, DAMAGED, str(e))
        except OtherVersion as e:
            trouble = Unreadable(step, OTHER_VERSION, str(e))
        worst = any_trouble(peers, f"{key}/{step}", trouble)
        if worst is None:
            return resumed
        unreadable = (*unreadable, worst)
    if not unreadable:
        return None
    why = OTHER_VERSION if any(u.why == OTHER_VERSION for u in unreadable) else DAMAGED
    raise ValueError(f"{folder}: {_NONE[why]}")


def any_trouble(peers: ProcessGroup, key: str, trouble: Unreadable | None) -> Unreadable | None:
    """The first process's trouble, on every process; process 0 logs it."""
    worst = next(filter(None, peers.all_gather(key, trouble, Unreadable | None)), None)
    if worst and peers.is_primary:
        log.warning("checkpoint of step %d %s: %s", worst.step, _WORDS[worst.why], worst.met)
    return worst


def restore(
    saver: Checkpointer, resumed: Resumed, peers: ProcessGroup, *, reset_optimizer: bool = False
) -> Resumed:
    """Load the checkpoint's arrays, or those of an older one where it is damaged; returns the one
    that was used. Newer ones are set aside: this run writes those steps anew.

    Raises:
      ValueError: it is of another model, or none can be read.
    """
    while True:
        step = resumed.state.step
        try:
            saver.restore(resumed.reader, reset_optimizer=reset_optimizer)
            break
        except CorruptCheckpoint as e:  # on every process
            trouble = any_trouble(peers, f"damaged/{step}", Unreadable(step, DAMAGED, str(e)))
            assert trouble is not None
            older = find_checkpoint(saver.store.root, peers, (*resumed.unreadable, trouble))
            assert older is not None, "it raises where none is left"
            resumed = older
    for u in resumed.unreadable if peers.is_primary else ():
        folder = saver.store.set_aside(u.step, u.why)
        log.warning("checkpoint of step %d stays as %s until a newer one is saved", u.step, folder)
    return resumed

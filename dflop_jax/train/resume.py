"""The state that a run goes on from beside its arrays, and how all processes together find the
checkpoint that holds it and restore the arrays."""

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
from dflop_jax.records import Plan, PriceList, Profile
from dflop_jax.schedule.correction import CorrectionState
from dflop_jax.train.run_context import RunContext
from dflop_jax.train.step_figures import SkippedSteps

log = logging.getLogger(__name__)
VERSION = 4  # of `RunState` in checkpoints
_WARNINGS = {
    DAMAGED: "is damaged, using an older one",
    OTHER_VERSION: "is of another version of this program, using an older one",
}
_NONE_READABLE = {
    DAMAGED: "no checkpoint is whole; start again with --overwrite",
    OTHER_VERSION: "this version of the program reads none of the checkpoints; resume by the one "
    "that wrote them, or choose another --run_dir",
}
_PROCESSES, _DEVICES, _KIND = "processes", "devices", "kind of device"
_MEMORY, _FROZEN = "memory of a device", "frozen parts"
_RECORDED_FLAGS = ("model.", "data.", "train.", "plan.")
# Flags of plan.* that do not decide between plans.
_NO_CHOICE = {"plan.devices", "plan.hardware", "plan.redecide_every"}
# A profile is measured anew where one of these differs.
_PROFILE_SETTINGS = {
    "plan.max_model",
    "plan.profile_samples",
    "model.dtype",
    "model.attention_kernel",
    "data.tokenizer",
    *(f"data.{name}" for name in vars(Limits())),
    _KIND,
}
# A plan is searched anew where one of these differs, or a flag of plan.* but _NO_CHOICE.
_PLAN_SETTINGS = _PROFILE_SETTINGS | {
    "train.global_batch",
    "train.remat",
    _PROCESSES,
    _DEVICES,
    _MEMORY,
    _FROZEN,
}
# Share by which a device's memory may differ from that of the run before: jax's limit depends a
# little on what else was in memory when jax started, and plans leave as much free.
_MEMORY_TOLERANCE = 0.05


@dataclass(frozen=True)
class RunState:
    """The state of a run beside its arrays. A checkpoint stores it, a run updates it.

    Attributes:
      step: steps that are done.
      loader: see `Loader.state`.
      plan, profile: None where they are to be made anew.
      prices: that batches are scheduled by; None where they are to be made anew.
      settings: flags and devices of the run, by name; see `run_settings`.
      learnt: corrections of the prices, where the run corrects them.
      skips: counts of the updates that were left out.
    """

    step: int = 0
    loader: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    profile: Profile | None = None
    prices: PriceList | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    learnt: CorrectionState | None = None
    skips: SkippedSteps = field(default_factory=SkippedSteps)
    version: int = VERSION


def read_state(record: Mapping[str, Any]) -> RunState:
    """Return the `RunState` that a checkpoint stores as `msgspec.to_builtins` gave it.

    Raises:
      OtherVersion: the record is of a version that this program does not read.
    """
    if (version := record.get("version")) != VERSION:
        raise OtherVersion(f"its state has version {version}, this program reads {VERSION}")
    try:
        return msgspec.convert(record, RunState)
    except msgspec.ValidationError as e:  # what the checksums cover is as it was written
        raise OtherVersion(f"its state is of another version of this program: {e}") from None


def run_settings(context: RunContext) -> dict[str, Any]:
    """Return the flags of model, data, training and planning and the devices of a run, by name, as
    JSON has them."""
    return flag_settings(context.config) | {
        _PROCESSES: context.peers.n_processes,
        _DEVICES: len(context.devices),
        _KIND: context.devices[0].device_kind,
        _MEMORY: context.bytes_limit,
        _FROZEN: ", ".join(sorted(context.trained.frozen)) or "none",
    }


def flag_settings(config: Config) -> dict[str, Any]:
    """Return the flags of model, data, training and planning, by dotted name, as JSON has them."""
    flags = {leaf.name: leaf.value(config) for leaf in fields()}
    recorded = {n: v for n, v in flags.items() if n.startswith(_RECORDED_FLAGS)}
    return {n: [*v] if isinstance(v, tuple) else v for n, v in recorded.items()}


def frozen_parts(record: Mapping[str, Any]) -> list[str]:
    """Return the parts that were frozen in the run of a checkpoint's record.

    Raises:
      OtherVersion: see `read_state`.
    """
    return read_state(record).settings[_FROZEN].split(", ")


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that differ, by name: "NOW (was BEFORE)" as text."""
    return {
        name: f"{_text(value)} (was {_text(before[name])})"
        for name, value in now.items()
        if name in before and before[name] != value
    }


def describe_changed_flags(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name the flags of model, data and training that differ, with both values; "" for none."""
    changes = find_changes(before, now)
    training = [n for n in changes if n.startswith(("model.", "data.", "train."))]
    return ", ".join(f"{name} {changes[name]}" for name in training)


def is_other_device_count(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the numbers of devices or processes differ."""
    return bool({_PROCESSES, _DEVICES} & find_changes(before, now).keys())


def reuse_state(
    stored: RunState, now: Mapping[str, Any], plan: Plan | None, profile: Profile | None
) -> tuple[RunState, str]:
    """Return the plan, profile and prices that a resumed run can use, and a line for the log ("":
    none).

    The stored plan and prices serve where no setting that decides between plans differs. The stored
    profile serves where no setting differs that it was measured under; other numbers of devices and
    processes are allowed. A plan or a profile that is given goes before the stored one.

    Args:
      now: settings of the resumed run.
      plan, profile: that are given.

    Raises:
      ValueError: other parts train now.
    """
    before = stored.settings
    changes = {
        name: text
        for name, text in find_changes(before, now).items()
        if name in _PLAN_SETTINGS or (name.startswith("plan.") and name not in _NO_CHOICE)
    }
    if _MEMORY in changes and isclose(before[_MEMORY], now[_MEMORY], rel_tol=_MEMORY_TOLERANCE):
        del changes[_MEMORY]
    if _FROZEN in changes:
        raise ValueError(
            f"the checkpoint was trained with {before[_FROZEN]} frozen, this run with "
            f"{now[_FROZEN]}: it is of another model or choice of frozen parts; give the same "
            "train.stage, train.freeze and train.lora_rank, or start a new run"
        )
    if profile is None and not _PROFILE_SETTINGS & changes.keys():
        profile = stored.profile
        if profile and _DEVICES in changes:
            profile = scale_concurrency(profile, before[_DEVICES], now[_DEVICES])
    if not changes and plan in (None, stored.plan):
        return replace(stored, profile=profile), ""
    message = ""
    if plan is None:
        names = "; ".join(f"{name} {text}" for name, text in changes.items())
        message = f"{names}: planning anew"
    return replace(stored, plan=plan, profile=profile, prices=None), message


def scale_concurrency(profile: Profile, before: int, now: int) -> Profile:
    """Return a profile measured with `before` devices for `now` of the same kind: the times of
    layers stay, and the same share of the devices computes at once."""
    model = profile.model
    concurrency = min(float(now), model.concurrency * now / before)
    return replace(profile, model=replace(model, concurrency=concurrency))


def _text(value: Any) -> str:
    return (",".join(map(str, value)) if isinstance(value, list) else str(value)) or "empty"


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
    """A checkpoint to set aside: some process cannot read it, or an older one was requested.

    Attributes:
      why: DAMAGED, OTHER_VERSION or PASSED_OVER.
      error: the message of the error that was raised; "" for PASSED_OVER.
    """

    step: int
    why: str
    error: str


def find_checkpoint(
    folder: Path, peers: ProcessGroup, unreadable: list[Unreadable], at: int | None = None
) -> tuple[RunState, CheckpointReader] | None:
    """Return the newest checkpoint that every process can open, older than those in `unreadable`;
    None if there is none at all. Newer ones that cannot be opened are logged, left as they are and
    added to `unreadable`.

    Args:
      at: the step to resume from; newer ones are added to `unreadable`.

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
        unreadable += [Unreadable(s, PASSED_OVER, "") for s in steps if s > at]
        steps = [s for s in steps if s <= at]
    for step in steps:
        error, opened = None, None
        try:
            reader = store.open(step)
            opened = read_state(reader.run_state), reader
        except CorruptCheckpoint as e:
            error = Unreadable(step, DAMAGED, str(e))
        except OtherVersion as e:
            error = Unreadable(step, OTHER_VERSION, str(e))
        worst = gather_unreadable(peers, f"{key}/{step}", error)
        if worst is None:
            return opened
        unreadable.append(worst)
    if not unreadable:
        return None
    why = OTHER_VERSION if any(u.why == OTHER_VERSION for u in unreadable) else DAMAGED
    raise ValueError(f"{folder}: {_NONE_READABLE[why]}")


def gather_unreadable(peers: ProcessGroup, key: str, error: Unreadable | None) -> Unreadable | None:
    """Return the error of the first process that has one, on every process; process 0 logs it."""
    worst = next(filter(None, peers.all_gather(key, error, Unreadable | None)), None)
    if worst and peers.is_primary:
        log.warning("checkpoint of step %d %s: %s", worst.step, _WARNINGS[worst.why], worst.error)
    return worst


def restore(
    saver: Checkpointer,
    checkpoint: tuple[RunState, CheckpointReader],
    unreadable: list[Unreadable],
    peers: ProcessGroup,
    *,
    reset_optimizer: bool = False,
) -> RunState:
    """Load a checkpoint's arrays, or those of an older one where it is damaged, and return the
    state of the one that was used. Newer ones are set aside: this run saves those steps again.

    Raises:
      ValueError: the checkpoint is of another model, or none can be read.
    """
    while True:
        state, reader = checkpoint
        try:
            saver.restore(reader, reset_optimizer=reset_optimizer)
            break
        except CorruptCheckpoint as e:  # on every process
            error = Unreadable(state.step, DAMAGED, str(e))
            worst = gather_unreadable(peers, f"damaged/{state.step}", error)
            assert worst is not None
            unreadable.append(worst)
            older = find_checkpoint(saver.store.root, peers, unreadable)
            assert older is not None, "find_checkpoint raises where none is left"
            checkpoint = older
    for u in unreadable if peers.is_primary else ():
        folder = saver.store.set_aside(u.step, u.why)
        log.warning("checkpoint of step %d stays as %s until a newer one is saved", u.step, folder)
    return state

"""The state of a run besides its arrays; how all processes find and restore a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.checkpoint.format import CorruptCheckpoint, OtherVersion
from dflop_jax.checkpoint.store import (
    DAMAGED,
    OTHER_VERSION,
    PASSED_OVER,
    CheckpointReader,
    CheckpointStore,
)
from dflop_jax.config import Config, fields
from dflop_jax.data.media.medium import LIMITS
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.records import Plan, PriceList, Profile
from dflop_jax.schedule.correction import CorrectionState
from dflop_jax.train.run_context import RunContext
from dflop_jax.train.step_figures import SkippedSteps
from dflop_jax.train.trials import Trial, drop_failed, next_plan, plan_key

log = logging.getLogger(__name__)
VERSION = 5  # version of `RunState` in checkpoints
_PROCESSES, _DEVICES, _KIND = "processes", "devices", "kind of device"
_MEMORY, _FROZEN = "memory of a device", "frozen parts"
_RECORDED_FLAGS = ("model.", "data.", "train.", "plan.")
_FAILED = "failed-"  # before `plan_key`, the name of a file that says why the plan cannot train
# Flags of plan.* that do not affect the choice of a plan.
_FLAGS_WITHOUT_EFFECT = {"plan.devices", "plan.hardware", "plan.redecide_every", "plan.trials"}
# The profile is measured again if one of these changes.
_PROFILE_SETTINGS = {
    "plan.max_model",
    "plan.profile_samples",
    "model.dtype",
    "model.attention_kernel",
    "model.matmul",
    "data.tokenizer",
    *(f"data.{name}" for name in LIMITS),
    _KIND,
}
# The plan is searched again if one of these changes, or another flag of plan.*.
_PLAN_SETTINGS = _PROFILE_SETTINGS | {
    "train.global_batch",
    "train.remat",
    _PROCESSES,
    _DEVICES,
    _MEMORY,
    _FROZEN,
}
# Relative tolerance for a device's memory in a resumed run: jax's limit depends a little on other
# programs' memory when jax started, and plans leave this share free.
_MEMORY_TOLERANCE = 0.05


@dataclass(frozen=True)
class RunState:
    """The state of a run besides its arrays, as checkpoints store it. None: to be made again."""

    step: int = 0  # steps that are done
    loader: dict[str, Any] = field(default_factory=dict)  # see `Loader.state`
    plan: Plan | None = None
    profile: Profile | None = None
    prices: PriceList | None = None  # prices that schedule batches
    settings: dict[str, Any] = field(default_factory=dict)  # see `run_settings`
    learnt: CorrectionState | None = None  # if the run corrects its prices
    skips: SkippedSteps = field(default_factory=SkippedSteps)
    trials: tuple[Trial, ...] = ()  # of the plans that the run chooses or has chosen between
    version: int = VERSION

    def continue_from(self, stored: RunState) -> RunState:
        """Return the stored state with this one's plan, profile, prices, settings and trials."""
        names = ("plan", "profile", "prices", "settings", "trials")
        fields_kept = {n: getattr(self, n) for n in names}
        return replace(stored, **fields_kept)


def read_state(record: Mapping[str, Any]) -> RunState:
    """Read the `RunState` in a checkpoint's record; OtherVersion if it is of another version."""
    if (version := record.get("version")) != VERSION:
        raise OtherVersion(f"its state has version {version}, this program reads {VERSION}")
    try:
        return msgspec.convert(record, RunState)
    except msgspec.ValidationError as e:  # the checksums exclude damage, so the version differs
        raise OtherVersion(f"its state is of another version of this program: {e}") from None


def run_settings(context: RunContext) -> dict[str, Any]:
    """Return a run's recorded flags and its devices, by name."""
    return flag_settings(context.config) | {
        _PROCESSES: context.peers.n_processes,
        _DEVICES: len(context.devices),
        _KIND: context.devices[0].device_kind,
        _MEMORY: context.bytes_limit,
        _FROZEN: ", ".join(sorted(context.trained.frozen)) or "none",
    }


def flag_settings(config: Config) -> dict[str, Any]:
    """Return the flags of model, data, training and planning, by dotted name, as JSON values."""
    flags = {leaf.name: leaf.value(config) for leaf in fields()}
    recorded = {n: v for n, v in flags.items() if n.startswith(_RECORDED_FLAGS)}
    return {n: [*v] if isinstance(v, tuple) else v for n, v in recorded.items()}


def frozen_parts(record: Mapping[str, Any]) -> list[str]:
    """Return the parts that were frozen in the run of a checkpoint's record."""
    return read_state(record).settings[_FROZEN].split(", ")


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that differ, by name: "NOW (was BEFORE)" as text."""
    return {
        name: f"{_text(value)} (was {_text(before[name])})"
        for name, value in now.items()
        if name in before and before[name] != value
    }


def describe_changed_flags(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name the flags of model, data and training that differ, with both values; "" if none does."""
    changes = find_changes(before, now).items()
    prefixes = "model.", "data.", "train."
    return ", ".join(f"{name} {text}" for name, text in changes if name.startswith(prefixes))


def is_other_device_count(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the numbers of devices or processes differ."""
    return bool({_PROCESSES, _DEVICES} & find_changes(before, now).keys())


def reuse_state(
    stored: RunState, now: Mapping[str, Any], plan: Plan | None, profile: Profile | None
) -> tuple[RunState, str]:
    """Return the state with the plan, profile and prices that a resumed run can use, and a line for
    the log ("": none).

    The stored plan and prices are used if no setting that affects the plan changed; the stored
    profile is used if none changed that it was measured under, apart from numbers of devices and
    processes. A given plan or profile takes precedence. ValueError if other parts train now.
    """
    before = stored.settings
    changes = {
        name: text
        for name, text in find_changes(before, now).items()
        if name in _PLAN_SETTINGS
        or (name.startswith("plan.") and name not in _FLAGS_WITHOUT_EFFECT)
    }
    if _MEMORY in changes and isclose(before[_MEMORY], now[_MEMORY], rel_tol=_MEMORY_TOLERANCE):
        del changes[_MEMORY]
    if _FROZEN in changes:
        raise ValueError(
            f"the checkpoint was trained with {before[_FROZEN]} frozen, this run with "
            f"{now[_FROZEN]}: it is from another model or choice of frozen parts; give the same "
            "train.stage, train.freeze and train.lora_rank, or start a new run"
        )
    if profile is None and not _PROFILE_SETTINGS & changes.keys():
        profile = stored.profile
        if profile and _DEVICES in changes:  # the share of devices that compute at once stays
            model, n = profile.model, now[_DEVICES]
            concurrency = min(float(n), model.concurrency * n / before[_DEVICES])
            profile = replace(profile, model=replace(model, concurrency=concurrency))
    if not changes and plan in (None, stored.plan):
        return replace(stored, profile=profile), ""
    names = "; ".join(f"{name} {text}" for name, text in changes.items())
    message = "" if plan else f"{names}: planning again"
    return replace(stored, plan=plan, profile=profile, prices=None), message


def record_failure(checkpoints: Path, plan: Plan, reason: str) -> None:
    """Write beside the checkpoints why a plan of the trials cannot train. Any process may call it;
    of several, the first one's reason stays."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), (checkpoints / f"{_FAILED}{plan_key(plan)}").open("x") as file:
        file.write(reason)


def drop_failed_plans(state: RunState, checkpoints: Path) -> RunState:
    """Return the state without trials whose failure is recorded, and under the plan that its trials
    then need; ValueError if none is left."""
    reasons = {f.name.removeprefix(_FAILED): f.read_text() for f in checkpoints.glob(f"{_FAILED}*")}
    trials = drop_failed(state.trials, reasons)
    if trials == state.trials:
        return state
    if (plan := next_plan(trials)) is None:
        raise ValueError(
            f"no plan of the trials fits into memory: {trials[-1].failure}; use a smaller "
            "--plan.memory_bytes"
        )
    if plan == next_plan(state.trials):  # another one failed
        return replace(state, trials=trials)
    return replace(state, plan=plan, prices=None, trials=trials)


def _text(value: Any) -> str:
    return (",".join(map(str, value)) if isinstance(value, list) else str(value)) or "empty"


@dataclass(frozen=True)
class Resume:
    """How to resume a run."""

    at: int | None = None  # step of the checkpoint, None: the newest; newer ones are set aside
    reset_optimizer: bool = False  # the new optimizer may differ


@dataclass(frozen=True)
class UnreadableCheckpoint:
    """A checkpoint to set aside: some process cannot read it, or an older one was requested."""

    step: int
    why: str  # DAMAGED, OTHER_VERSION or PASSED_OVER
    error: str  # the message of the error; "" for PASSED_OVER


def find_checkpoint(
    folder: Path, peers: ProcessGroup, unreadable: list[UnreadableCheckpoint], at: int | None = None
) -> tuple[RunState, CheckpointReader] | None:
    """Return the newest checkpoint that every process can open, older than those in `unreadable`;
    None if there is none. Newer ones that cannot be opened are logged and added to `unreadable`,
    like those that are newer than step `at`. ValueError if none can be read."""
    store = CheckpointStore(folder)
    below = min((u.step for u in unreadable), default=None)
    steps = [s for s in store.steps() if below is None or s < below] if peers.is_primary else []
    key = f"checkpoints/{below}"
    steps = peers.broadcast(key, steps, list[int])
    if at is not None:
        if at not in steps:
            raise ValueError(store.describe_missing_step(at, steps))
        unreadable += [UnreadableCheckpoint(s, PASSED_OVER, "") for s in steps if s > at]
        steps = [s for s in steps if s <= at]
    for step in steps:
        error, opened = None, None
        try:
            reader = store.open(step)
            opened = read_state(reader.run_state), reader
        except (CorruptCheckpoint, OtherVersion) as e:
            why = DAMAGED if isinstance(e, CorruptCheckpoint) else OTHER_VERSION
            error = UnreadableCheckpoint(step, why, str(e))
        first = agree_on_unreadable(peers, f"{key}/{step}", error)
        if first is None:
            return opened
        unreadable.append(first)
    if not unreadable:
        return None
    if any(u.why == OTHER_VERSION for u in unreadable):
        raise ValueError(
            f"{folder}: this version of the program cannot read the checkpoints; resume with the "
            "one that wrote them, or choose another --run_dir"
        )
    raise ValueError(f"{folder}: no checkpoint is complete; start again with --overwrite")


def agree_on_unreadable(
    peers: ProcessGroup, key: str, error: UnreadableCheckpoint | None
) -> UnreadableCheckpoint | None:
    """Return the error of the first process that has one, on every process; process 0 logs it."""
    first = next(filter(None, peers.all_gather(key, error, UnreadableCheckpoint | None)), None)
    if first and peers.is_primary:
        is_damaged = first.why == DAMAGED
        problem = "damaged" if is_damaged else "of another version of this program"
        text = "checkpoint of step %d is %s, using an older one: %s"
        log.warning(text, first.step, problem, first.error)
    return first


def restore(
    saver: Checkpointer,
    checkpoint: tuple[RunState, CheckpointReader],
    unreadable: list[UnreadableCheckpoint],
    peers: ProcessGroup,
    *,
    reset_optimizer: bool = False,
) -> RunState:
    """Load a checkpoint's arrays, or those of an older one if it is damaged, and return the state
    of the loaded one. Newer ones are set aside: this run saves those steps again. ValueError if the
    checkpoint is of another model, or none can be read."""
    while True:
        state, reader = checkpoint
        try:
            saver.restore(reader, reset_optimizer=reset_optimizer)
            break
        except CorruptCheckpoint as e:  # raised on every process
            error = UnreadableCheckpoint(state.step, DAMAGED, str(e))
            first = agree_on_unreadable(peers, f"damaged/{state.step}", error)
            unreadable.append(first or error)
            older = find_checkpoint(saver.store.root, peers, unreadable)
            assert older is not None, "find_checkpoint raises where none is left"
            checkpoint = older
    for u in unreadable if peers.is_primary else ():
        folder = saver.store.set_aside(u.step, u.why)
        log.warning("checkpoint of step %d stays as %s until a newer one is saved", u.step, folder)
    return state

"""Finding and restoring the checkpoint that a run continues from, all processes together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

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
from dflop_jax.cluster.messages import ProcessGroup
from dflop_jax.train.meta import Meta, read_meta

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

    meta: Meta
    reader: CheckpointReader
    unreadable: tuple[Unreadable, ...] = ()

    def says(self, steps: int) -> str:
        """What is said of a run of so many steps that goes on from here."""
        return f"resumed after step {self.meta.step} of {steps}"


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
    steps = [s for s in store.steps() if below is None or s < below] if peers.is_hub else []
    key = f"checkpoints/{below}"
    shared = peers.broadcast(key, msgspec.json.encode(steps))
    steps = msgspec.json.decode(shared, type=list[int])
    if at is not None:
        if at not in steps:
            raise ValueError(store.no_step(at, steps))
        newer = [Unreadable(s, PASSED_OVER, "") for s in steps if s > at]
        unreadable, steps = (*unreadable, *newer), [s for s in steps if s <= at]
    for step in steps:
        resumed, trouble = None, None
        try:
            reader = store.open(step)
            resumed = Resumed(read_meta(reader.meta), reader, unreadable)
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
    text = msgspec.json.encode(trouble).decode() if trouble else ""
    if not (first := peers.first_text(key, text)):
        return None
    worst = msgspec.json.decode(first, type=Unreadable)
    if peers.is_hub:
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
        step = resumed.meta.step
        try:
            saver.restore(resumed.reader, reset_optimizer=reset_optimizer)
            break
        except CorruptCheckpoint as e:  # on every process
            trouble = any_trouble(peers, f"damaged/{step}", Unreadable(step, DAMAGED, str(e)))
            assert trouble is not None
            older = find_checkpoint(saver.folder, peers, (*resumed.unreadable, trouble))
            assert older is not None, "it raises where none is left"
            resumed = older
    store = CheckpointStore(saver.folder)
    for u in resumed.unreadable if peers.is_hub else ():
        folder = store.set_aside(u.step, u.why)
        log.warning("checkpoint of step %d stays as %s until a newer one is saved", u.step, folder)
    return resumed

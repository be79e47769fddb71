"""Finding and restoring the checkpoint that a run continues from, all processes together."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.checkpoint.store import CheckpointStore, CorruptCheckpoint, Reader
from dflop_jax.cluster.peers import Peers
from dflop_jax.records import Plan, PriceList, Profile
from dflop_jax.schedule.learnt import Learnt
from dflop_jax.train.skips import Skips

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meta:
    """What a checkpoint keeps beside arrays.

    Attributes:
      policy: as configured; the plan names what was chosen.
      loader: see `Loader.state`.
      prices: that batches are scheduled by.
      processes, devices: of the run that saved it.
      learnt: corrections of the prices, where they are corrected.
      skips: of the updates that were left out.
    """

    step: int
    policy: str
    loader: dict[str, Any]
    plan: Plan
    profile: Profile
    prices: PriceList
    processes: int
    devices: int
    learnt: Learnt | None = None
    skips: Skips = field(default_factory=Skips)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to continue from, open on this process."""

    meta: Meta
    reader: Reader


def find_checkpoint(folder: Path, peers: Peers, below: int | None = None) -> Resumed | None:
    """Return the newest whole checkpoint (before step `below`) that every process can open; None
    if there is none. One that is damaged is named and left out.

    Raises:
      ValueError: none of those that are there is whole.
      StorageError: the folder cannot be read.
    """
    store = CheckpointStore(folder)
    steps = [s for s in store.steps() if below is None or s < below] if peers.is_hub else []
    key = f"checkpoints/{below}"
    shared = peers.share(key, msgspec.json.encode(steps))
    for step in msgspec.json.decode(shared, type=list[int]):
        resumed, trouble = None, ""
        try:
            reader = store.open(step)
            resumed = Resumed(msgspec.convert(reader.meta, Meta), reader)
        except (CorruptCheckpoint, msgspec.ValidationError) as e:
            trouble = f"checkpoint of step {step} is damaged, using an older one: {e}"
        if not any_trouble(peers, f"{key}/{step}", trouble):
            return resumed
    if shared != b"[]" and below is None:
        raise ValueError(f"{folder}: no checkpoint is whole; start again with --overwrite")
    return None


def any_trouble(peers: Peers, key: str, trouble: str) -> bool:
    """Whether any process has trouble; process 0 logs the first."""
    worst = peers.first_text(key, trouble)
    if worst and peers.is_hub:
        log.warning("%s", worst)
    return bool(worst)


def restore(saver: Checkpointer, resumed: Resumed, peers: Peers) -> Resumed:
    """Load the checkpoint's arrays, or those of an older one where it is damaged; returns the one
    that was used. Newer ones are removed: this run writes those steps anew.

    Raises:
      ValueError: it is of another model, or none is whole.
    """
    candidate: Resumed | None = resumed
    while candidate is not None:
        step = candidate.meta.step
        try:
            saver.restore(candidate.reader)
        except CorruptCheckpoint as e:
            if peers.is_hub:
                log.warning("checkpoint of step %d is damaged, using an older one: %s", step, e)
            candidate = find_checkpoint(saver.folder, peers, below=step)
            continue
        if peers.is_hub:
            store = CheckpointStore(saver.folder)
            for later in (s for s in store.steps() if s > step):
                store.discard(later)
        return candidate
    raise ValueError(f"{saver.folder}: no checkpoint is whole; start again with --overwrite")

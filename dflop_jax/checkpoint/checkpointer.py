"""Checkpoints of a run: what is saved, when it is copied, and how it comes back.

Arrays are named by module and parameter, with the layers of a module stacked, so a checkpoint does
not depend on the plan: another plan, or another number of processes, reads its own slices of it.
Parameters are saved as the optimizer has them, in float32; those that do not train as they are.

Saving does not stop training. The arrays of the step are copied to the host while the next step
runs forward and backward; only its update, which donates them, waits for the copy. Writing goes on
after that in the background, and the checkpoint exists once process 0 has committed it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.checkpoint.state_arrays import StateArray, read_array, specs_of, state_arrays
from dflop_jax.checkpoint.store import (
    ArrayPiece,
    CheckpointReader,
    CheckpointStore,
    CorruptCheckpoint,
    WrittenPart,
)
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import RunFailed
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import initial_structs

log = logging.getLogger(__name__)
Waiting = Callable[[], AbstractContextManager[None]]


def _saved(ex: Executor, segment: str, kind: str) -> Any:
    """A tree as it is saved: `initial_structs`, or the optimizer's state."""
    if kind == "params":
        return {**ex.state.params[segment], **ex.state.masters.get(segment, {})}
    return ex.state.opt_state[segment]


def _pieces(a: StateArray, index: tuple[slice, ...], data: np.ndarray) -> Iterator[ArrayPiece]:
    """A shard, as boxes of its array."""
    for place, box in a.boxes(index):
        starts, sizes = tuple(b[0] for b in box), [b[1] - b[0] for b in box]
        yield ArrayPiece(a.name, starts, data[place].reshape(sizes))


class Checkpointer:
    """Saves an executor's state in the background, all processes together, and restores it.

    Args:
      waiting: entered where training waits for a save.
    """

    def __init__(
        self,
        folder: Path,
        ex: Executor,
        peers: ProcessGroup,
        *,
        keep: int,
        keep_every: int = 0,
        waiting: Waiting = nullcontext,
    ):
        self._ex, self._peers = ex, peers
        self.store = CheckpointStore(folder, keep=keep, keep_every=keep_every)
        arrays = state_arrays(ex)
        self._specs = specs_of(arrays)
        by_tree = groupby(arrays, key=lambda a: (a.segment, a.kind))
        self._arrays = {tree: [*of_tree] for tree, of_tree in by_tree}
        self._waiting = waiting
        self._copied = copied = threading.Event()
        self._waits_s = waits_s = list[float]()  # of updates for the copy
        self._thread: threading.Thread | None = None
        self._begun_s = 0.0  # what beginning to save has taken
        self._error: BaseException | None = None
        self.trouble = ""  # why the last save failed, on process 0
        copied.set()

        # Holds no saver, nor does the executor by it, whose state goes with it: the next one needs
        # the memory.
        def wait_copied() -> None:
            if not copied.is_set():
                start = time.perf_counter()
                with waiting():
                    copied.wait()
                waits_s.append(time.perf_counter() - start)

        ex.before_update = wait_copied

    @property
    def stall_s(self) -> float:
        """What saving has kept training waiting."""
        return self._begun_s + sum(self._waits_s)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way, which the next one would wait for."""
        return self._thread is not None and self._thread.is_alive()

    # ---- saving ----

    def save(self, step: int, meta: Future[Mapping[str, Any]]) -> None:
        """Begin to save the state after `step` steps; returns at once.

        It is committed once `meta` is there, when the rows of these steps are in the metrics.
        A checkpoint that cannot be written is reported and left out; training goes on.
        """
        start = time.perf_counter()
        self.wait()
        self.trouble = ""
        held = list(self._local_shards())
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._run, args=(held, step, meta), name="checkpoint", daemon=True
        )
        self._thread.start()
        self._begun_s += time.perf_counter() - start

    def wait(self) -> None:
        """Wait until the save under way has ended."""
        if self._thread is not None:
            with self._waiting():
                self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise what ended a save, unless that is reported and left out."""
        if self._error is not None:
            raise self._error

    def _local_shards(self) -> Iterator[tuple[StateArray, Any]]:
        """What this process saves: of each leaf its shards, one of each set of replicas."""
        for (segment, kind), arrays in self._arrays.items():
            leaves = jax.tree.leaves(_saved(self._ex, segment, kind))
            for a in arrays:
                for shard in leaves[a.leaf].addressable_shards if a.saves else ():
                    if shard.replica_id == 0 and a.is_first_replica(shard.index):
                        yield a, shard

    def _run(
        self, held: list[tuple[StateArray, Any]], step: int, meta: Future[Mapping[str, Any]]
    ) -> None:
        try:
            try:
                # np.array copies: the buffer is donated to the next update.
                pieces = [p for a, s in held for p in _pieces(a, s.index, np.array(s.data))]
                held.clear()
            finally:
                self._copied.set()
            self.trouble = self._write(step, pieces, meta)
            if self.trouble:
                log.warning("no checkpoint after step %d: %s", step, self.trouble)
        except RunFailed:
            pass  # the main thread meets it too
        except BaseException as e:
            self._error = e

    def _write(self, step: int, pieces: list[ArrayPiece], meta: Future[Mapping[str, Any]]) -> str:
        """Write on all processes, commit on process 0; there it is returned why that failed, of the
        first process that did, "" where none did."""
        key, peers, trouble = f"checkpoint/{step}", self._peers, ""
        if peers.is_primary:
            try:
                self.store.prepare(step)
            except (OSError, ValueError) as e:
                trouble = str(e)
        if peers.broadcast(f"{key}/begin", trouble, str):
            return trouble
        part: WrittenPart | None = None
        try:
            part = self.store.write(step, self._specs, pieces, peers.process_index)
        except OSError as e:
            trouble = str(e) or type(e).__name__
        kind = tuple[WrittenPart | None, str]
        written = peers.gather(f"{key}/part", (part, trouble), kind)
        if not peers.is_primary:
            return ""
        known = meta.result()
        trouble = next((why for p, why in written if p is None), "")
        try:
            if trouble:
                self.store.discard(step)
            else:
                self.store.commit(step, self._specs, [p for p, _ in written], known)
        except OSError as e:
            trouble = trouble or str(e)
        return trouble

    # ---- restoring ----

    def restore(self, reader: CheckpointReader, *, reset_optimizer: bool = False) -> None:
        """Put a checkpoint's arrays into the executor, after one of its `init`s, each process its
        own slices; where the optimizer is reset, its state begins anew from the parameters. After
        an error the executor's state is of no use.

        Raises:
          ValueError: it is of another model or optimizer.
          CorruptCheckpoint: on every process, when a file that any of them needs is damaged.
        """
        self._check(reader, "params/" if reset_optimizer else "")
        trouble = ""
        state = self._ex.state
        try:
            for (segment, kind), arrays in self._arrays.items():
                if reset_optimizer and kind != "params":
                    continue
                tree = jax.tree.structure(self._structs(segment, kind))
                leaves = [read_array(reader, a) for a in arrays]
                getattr(state, kind)[segment] = jax.tree.unflatten(tree, leaves)
        except CorruptCheckpoint as e:
            trouble = str(e)
        every = self._peers.all_gather(f"restored/{reader.step}", trouble, str)
        if worst := next(filter(None, every), ""):
            raise CorruptCheckpoint(worst)
        # Only now that all have read theirs: the pieces of several processes may be gathered.
        for segment in self._ex.trainable:
            update = self._ex.programs.updates[segment]
            if reset_optimizer and segment in self._ex.programs.local_segments:
                began = update.init_state(state.params[segment])
                state.params[segment], state.masters[segment], state.opt_state[segment] = began
            else:
                made = update.split_masters(state.params[segment])
                state.params[segment], state.masters[segment] = made
        self._ex.share_tied()

    def _structs(self, segment: str, kind: str) -> Any:
        """The tree of what `_saved` gives."""
        programs = self._ex.programs
        if kind == "params":
            return initial_structs(programs.segments[segment])
        return programs.updates[segment].state_structs

    def _check(self, reader: CheckpointReader, prefix: str) -> None:
        """That what is read, all whose name begins so, fits."""
        where = f"checkpoint of step {reader.step}"
        wanted = {n: s for n, s in self._specs.items() if n.startswith(prefix)}
        there = {n for n in reader.specs if n.startswith(prefix)}
        for name in sorted(there ^ wanted.keys()):
            has = f"has {name}, this run has not" if name in there else f"has no {name}"
            raise ValueError(
                f"{where} {has}: it is of another model, optimizer or choice of frozen parts; use "
                "the same, --reset-optimizer, or start a new run"
            )
        for name, spec in wanted.items():
            known = reader.specs[name]
            dtypes = known.numpy_dtype, spec.numpy_dtype
            # What did not train may have been held in another precision.
            floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
            rounded = name.startswith("params/") and floats
            if known.shape != spec.shape or not (rounded or dtypes[0] == dtypes[1]):
                raise ValueError(
                    f"{where} has {name} as {known.dtype}{list(known.shape)}, this run needs "
                    f"{spec.dtype}{list(spec.shape)}; it is of another model: use the same, or "
                    "start a new run"
                )

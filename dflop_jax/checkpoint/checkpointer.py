"""Checkpoints of a run: saved arrays, asynchronous saving, and restoring.

Arrays are those of `runtime.state_arrays`, so another plan or another number of processes can read
its own slices of a checkpoint.

Saving does not stop training. The arrays of the step are copied to the host during the forward and
backward of the next step; only its update, which donates the arrays, waits for the copy. A
background thread writes the files, and the checkpoint exists once process 0 has committed it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.checkpoint.format import ArrayBox, ArraySpec, CorruptCheckpoint, WrittenFile
from dflop_jax.checkpoint.store import CheckpointReader, CheckpointStore
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import RunFailed
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.state_arrays import (
    StateArray,
    by_tree,
    put_leaves,
    saved_tree,
    split_masters,
    state_arrays,
)

log = logging.getLogger(__name__)
Waiting = Callable[[], AbstractContextManager[None]]
RunStateFuture = Future[Mapping[str, Any]]


def specs_of(arrays: list[StateArray]) -> dict[str, ArraySpec]:
    return {a.name: ArraySpec(a.name, a.shape, a.struct.dtype.name) for a in arrays}


def read_array(reader: CheckpointReader, a: StateArray) -> jax.Array:
    """Read an array from a checkpoint. Each process reads only the slices of its devices."""

    def load(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        spans = (s.indices(n) for s, n in zip(index, struct.shape, strict=True))
        shard = np.zeros([stop - start for start, stop, _ in spans], struct.dtype)
        for position, box in a.boxes(index):
            read = reader.read(a.name, [b[0] for b in box], [b[1] - b[0] for b in box])
            shard[position] = read.reshape(shard[position].shape)
        return shard

    struct = a.struct
    return jax.make_array_from_callback(struct.shape, struct.sharding, load, dtype=struct.dtype)


def _split_shard(a: StateArray, index: tuple[slice, ...], data: np.ndarray) -> Iterator[ArrayBox]:
    for position, box in a.boxes(index):
        starts, sizes = tuple(b[0] for b in box), [b[1] - b[0] for b in box]
        yield ArrayBox(a.name, starts, data[position].reshape(sizes))


class Checkpointer:
    """Saves and restores an executor's state. All processes save together, in the background;
    `waiting` is entered while training waits for a save."""

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
        self._arrays = by_tree(arrays)
        self._waiting = waiting
        self._copied = copied = threading.Event()
        self._waits_s = waits_s = list[float]()  # seconds that updates waited for the copy
        self._thread: threading.Thread | None = None
        self._start_s = 0.0  # seconds spent in starting saves
        self._error: BaseException | None = None
        self.error_text = ""  # why the last save failed, on process 0
        copied.set()

        # Does not refer to `self`, so the executor does not keep the checkpointer's state alive.
        def wait_copied() -> None:
            if not copied.is_set():
                start = time.perf_counter()
                with waiting():
                    copied.wait()
                waits_s.append(time.perf_counter() - start)

        ex.before_update = wait_copied

    @property
    def stall_s(self) -> float:
        return self._start_s + sum(self._waits_s)

    @property
    def is_busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, run_state: RunStateFuture) -> None:
        """Start saving the state after `step` steps, and commit it when `run_state` is available.
        If a checkpoint cannot be written, that is logged, and training continues."""
        start = time.perf_counter()
        self.wait()
        self.error_text = ""
        local_shards = list(self._local_shards())
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._run, args=(local_shards, step, run_state), name="checkpoint", daemon=True
        )
        self._thread.start()
        self._start_s += time.perf_counter() - start

    def wait(self) -> None:
        if self._thread is not None:
            with self._waiting():
                self._thread.join()
            self._thread = None
        self.check()

    def check(self) -> None:
        """Raise the error that ended a save, unless it was only logged."""
        if self._error is not None:
            raise self._error

    def _local_shards(self) -> Iterator[tuple[StateArray, Any]]:
        """Yield the shards that this process saves: one of each set of replicas of a leaf."""
        for (segment, kind), arrays in self._arrays.items():
            leaves = jax.tree.leaves(saved_tree(self._ex, segment, kind))
            for a in arrays:
                for shard in leaves[a.leaf].addressable_shards if a.saves else ():
                    if shard.replica_id == 0 and a.is_first_replica(shard.index):
                        yield a, shard

    def _run(
        self, local_shards: list[tuple[StateArray, Any]], step: int, run_state: RunStateFuture
    ) -> None:
        try:
            try:
                # np.array copies: the buffer is donated to the next update.
                copies = ((a, s.index, np.array(s.data)) for a, s in local_shards)
                boxes = [box for copy in copies for box in _split_shard(*copy)]
                local_shards.clear()
            finally:
                self._copied.set()
            self.error_text = self._write(step, boxes, run_state)
            if self.error_text:
                log.warning("no checkpoint after step %d: %s", step, self.error_text)
        except RunFailed:
            pass  # the main thread raises it, too
        except BaseException as e:
            self._error = e

    def _write(self, step: int, boxes: list[ArrayBox], run_state: RunStateFuture) -> str:
        """Write on all processes, and commit on process 0. Return, there, the error message of the
        first process that failed, or ""."""
        key, peers, error_text = f"checkpoint/{step}", self._peers, ""
        if peers.is_primary:
            try:
                self.store.prepare(step)
            except (OSError, ValueError) as e:
                error_text = str(e)
        if peers.broadcast(f"{key}/begin", error_text, str):
            return error_text
        written_file: WrittenFile | None = None
        try:
            written_file = self.store.write(step, self._specs, boxes, peers.process_index)
        except OSError as e:
            error_text = str(e) or type(e).__name__
        result_type = tuple[WrittenFile | None, str]
        results = peers.gather(f"{key}/part", (written_file, error_text), result_type)
        if not peers.is_primary:
            return ""
        stored_state = run_state.result()
        error_text = next((text for p, text in results if p is None), "")
        try:
            if error_text:
                self.store.discard(step)
            else:
                self.store.commit(step, self._specs, [p for p, _ in results], stored_state)
        except OSError as e:
            error_text = error_text or str(e)
        return error_text

    def restore(self, reader: CheckpointReader, *, reset_optimizer: bool = False) -> None:
        """Read a checkpoint's arrays into an initialized executor. With `reset_optimizer`, the
        optimizer state starts anew from the parameters.

        Raises:
          ValueError: the checkpoint is from another model or optimizer.
          CorruptCheckpoint: on every process, if a file that one of them needs is damaged.
        """
        self._check(reader, "params/" if reset_optimizer else "")
        error_text = ""
        try:
            for (segment, kind), arrays in self._arrays.items():
                if reset_optimizer and kind != "params":
                    continue
                put_leaves(self._ex, segment, kind, [read_array(reader, a) for a in arrays])
        except CorruptCheckpoint as e:
            error_text = str(e)
        error_texts = self._peers.all_gather(f"restored/{reader.step}", error_text, str)
        if worst := next(filter(None, error_texts), ""):
            raise CorruptCheckpoint(worst)
        # After all processes have read their arrays, since these calls may run collectives.
        split_masters(self._ex, reset_optimizer=reset_optimizer)

    def _check(self, reader: CheckpointReader, prefix: str) -> None:
        """Raise ValueError if the stored arrays whose names begin with `prefix` do not match."""
        checkpoint_name = f"checkpoint of step {reader.step}"
        needed_specs = {n: s for n, s in self._specs.items() if n.startswith(prefix)}
        stored_names = {n for n in reader.specs if n.startswith(prefix)}
        for name in sorted(stored_names ^ needed_specs.keys()):
            is_stored = name in stored_names
            difference = f"has {name}, this run has not" if is_stored else f"has no {name}"
            raise ValueError(
                f"{checkpoint_name} {difference}: it is from another model, optimizer or set of "
                "frozen parts; use the same, or --reset-optimizer, or start a new run"
            )
        for name, spec in needed_specs.items():
            stored = reader.specs[name]
            dtypes = stored.numpy_dtype, spec.numpy_dtype
            # Frozen parameters may have been stored in another precision.
            floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
            rounded = name.startswith("params/") and floats
            if stored.shape != spec.shape or not (rounded or dtypes[0] == dtypes[1]):
                raise ValueError(
                    f"{checkpoint_name} has {name} as {stored.dtype}{list(stored.shape)}, this run "
                    f"needs {spec.dtype}{list(spec.shape)}; it is from another model: use the "
                    "same, or start a new run"
                )

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
    ArrayBox,
    CheckpointReader,
    CheckpointStore,
    CorruptCheckpoint,
    WrittenFile,
)
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import RunFailed
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import initial_structs

log = logging.getLogger(__name__)
Waiting = Callable[[], AbstractContextManager[None]]


def _saved_tree(ex: Executor, segment: str, kind: str) -> Any:
    """A tree as it is saved: `initial_structs`, or the optimizer's state."""
    if kind == "params":
        return {**ex.state.params[segment], **ex.state.masters.get(segment, {})}
    return ex.state.opt_state[segment]


def _split_shard(a: StateArray, index: tuple[slice, ...], data: np.ndarray) -> Iterator[ArrayBox]:
    """A shard, as boxes of its array."""
    for position, box in a.boxes(index):
        starts, sizes = tuple(b[0] for b in box), [b[1] - b[0] for b in box]
        yield ArrayBox(a.name, starts, data[position].reshape(sizes))


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
        self._start_s = 0.0  # what beginning to save has taken
        self._error: BaseException | None = None
        self.error_text = ""  # why the last save failed, on process 0
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
        return self._start_s + sum(self._waits_s)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way, which the next one would wait for."""
        return self._thread is not None and self._thread.is_alive()

    # ---- saving ----

    def save(self, step: int, run_state: Future[Mapping[str, Any]]) -> None:
        """Begin to save the state after `step` steps; returns at once.

        It is committed once `meta` is there, when the rows of these steps are in the metrics.
        A checkpoint that cannot be written is reported and left out; training goes on.
        """
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
            leaves = jax.tree.leaves(_saved_tree(self._ex, segment, kind))
            for a in arrays:
                for shard in leaves[a.leaf].addressable_shards if a.saves else ():
                    if shard.replica_id == 0 and a.is_first_replica(shard.index):
                        yield a, shard

    def _run(
        self,
        local_shards: list[tuple[StateArray, Any]],
        step: int,
        run_state: Future[Mapping[str, Any]],
    ) -> None:
        try:
            try:
                # np.array copies: the buffer is donated to the next update.
                boxes = [
                    p for a, s in local_shards for p in _split_shard(a, s.index, np.array(s.data))
                ]
                local_shards.clear()
            finally:
                self._copied.set()
            self.error_text = self._write(step, boxes, run_state)
            if self.error_text:
                log.warning("no checkpoint after step %d: %s", step, self.error_text)
        except RunFailed:
            pass  # the main thread meets it too
        except BaseException as e:
            self._error = e

    def _write(self, step: int, boxes: list[ArrayBox], run_state: Future[Mapping[str, Any]]) -> str:
        """Write on all processes, commit on process 0; there it is returned why that failed, of the
        first process that did, "" where none did."""
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
        error_text = ""
        state = self._ex.state
        try:
            for (segment, kind), arrays in self._arrays.items():
                if reset_optimizer and kind != "params":
                    continue
                tree = jax.tree.structure(self._structs(segment, kind))
                leaves = [read_array(reader, a) for a in arrays]
                getattr(state, kind)[segment] = jax.tree.unflatten(tree, leaves)
        except CorruptCheckpoint as e:
            error_text = str(e)
        error_texts = self._peers.all_gather(f"restored/{reader.step}", error_text, str)
        if worst := next(filter(None, error_texts), ""):
            raise CorruptCheckpoint(worst)
        # Only now that all have read theirs: the pieces of several processes may be gathered.
        for segment in self._ex.trainable:
            update = self._ex.programs.updates[segment]
            if reset_optimizer and segment in self._ex.programs.local_segments:
                initial_state = update.init_state(state.params[segment])
                state.params[segment], state.masters[segment], state.opt_state[segment] = (
                    initial_state
                )
            else:
                masters = update.split_masters(state.params[segment])
                state.params[segment], state.masters[segment] = masters
        self._ex.share_tied()

    def _structs(self, segment: str, kind: str) -> Any:
        """The tree of what `_saved` gives."""
        programs = self._ex.programs
        if kind == "params":
            return initial_structs(programs.segments[segment])
        return programs.updates[segment].state_structs

    def _check(self, reader: CheckpointReader, prefix: str) -> None:
        """That what is read, all whose name begins so, fits."""
        checkpoint_name = f"checkpoint of step {reader.step}"
        needed_specs = {n: s for n, s in self._specs.items() if n.startswith(prefix)}
        stored_names = {n for n in reader.specs if n.startswith(prefix)}
        for name in sorted(stored_names ^ needed_specs.keys()):
            difference = (
                f"has {name}, this run has not" if name in stored_names else f"has no {name}"
            )
            raise ValueError(
                f"{checkpoint_name} {difference}: it is of another model, optimizer or choice of "
                "frozen parts; use the same, --reset-optimizer, or start a new run"
            )
        for name, spec in needed_specs.items():
            stored = reader.specs[name]
            dtypes = stored.numpy_dtype, spec.numpy_dtype
            # What did not train may have been held in another precision.
            floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
            rounded = name.startswith("params/") and floats
            if stored.shape != spec.shape or not (rounded or dtypes[0] == dtypes[1]):
                raise ValueError(
                    f"{checkpoint_name} has {name} as {stored.dtype}{list(stored.shape)}, this run "
                    f"needs {spec.dtype}{list(spec.shape)}; it is of another model: use the same, "
                    "or start a new run"
                )

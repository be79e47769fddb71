"""Every program that a plan needs, compiled ahead, and the arrays they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import optax

from dflop_jax.contract import MultimodalModel
from dflop_jax.pipeline.communicator import absent, is_local
from dflop_jax.pipeline.exchange import Exchange
from dflop_jax.pipeline.order import (
    StepGraph,
    downstream,
    order_tasks,
    resources,
    step_graph,
    with_backward,
)
from dflop_jax.pipeline.segment import make_segments
from dflop_jax.pipeline.update import SegmentUpdate
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, ModuleShape, Plan, Task

Tree = Any


@dataclass(frozen=True)
class GroupArrays:
    """Host arrays of one group: `fields[module][name]` are [M, ranks * items, ...]; of each encoder
    that runs, `sources[module]` are the exchange's (index, or index and weight)."""

    bucket: int
    fields: Mapping[str, Mapping[str, np.ndarray]]
    sources: Mapping[str, tuple[np.ndarray, ...]]


Job = Callable[[], jax.stages.Lowered]
Program = Callable[..., Any]


@dataclass(frozen=True)
class Signature:
    """What a segment takes and gives at one shape, as sharded structs."""

    shape: ModuleShape
    x: dict[str, jax.ShapeDtypeStruct]
    fields: dict[str, jax.ShapeDtypeStruct]
    y: Tree


class Programs:
    """Segments, updates and exchanges of a plan with their compiled programs.

    Programs are compiled per distinct module shape, so K buckets cost at most K shapes a module.
    """

    def __init__(
        self,
        model: MultimodalModel,
        plan: Plan,
        tx: optax.GradientTransformation,
        *,
        devices: list[jax.Device],
        clip_norm: float,
        freeze: tuple[str, ...],
        rate_factors: Mapping[str, float],
        evaluates: bool,
    ):
        self.model, self.plan, self.evaluates = model, plan, evaluates
        self.segments = make_segments(model, plan, devices, freeze=freeze)
        self.trainable = tuple(n for n, s in self.segments.items() if s.trainable)
        self.backward = with_backward(plan, self.trainable)
        self.updates = {
            n: SegmentUpdate(self.segments[n], tx, clip_norm, rate_factors) for n in self.trainable
        }
        self.final = plan.segments[-1].name
        self.local = frozenset(n for n, s in self.segments.items() if is_local(s.mesh))
        self.downstream = {s.name: downstream(plan, s) for s in plan.segments}
        self.submesh = {s.name: s.submesh for s in plan.segments}
        of = resources(plan)
        self.resource = {s.name: of[s.submesh] for s in plan.segments}
        self._compiled: dict[Any, jax.stages.Compiled] = {}
        # Tracing shapes takes milliseconds, so what steps ask for is kept.
        self.signature = cache(self._signature)
        self.exchange = cache(self._exchange)
        self._elsewhere = cache(self._skipped)
        self._order = cache(self._ordered)

    def _signature(self, segment: str, bucket: int) -> Signature:
        s = self.segments[segment]
        shape = self.plan.buckets[bucket].shape_of(s.plan.module, self.model.item_tokens)
        return Signature(shape, s.x_structs(shape), s.field_structs(shape), s.y_structs(shape))

    def _exchange(self, below: str, bucket: int) -> Exchange:
        above = self.downstream[below]
        assert above is not None
        module = self.segments[below].plan.module
        return Exchange(
            self.signature(below, bucket).y,
            self.signature(above.name, bucket).x[module],
            self.model.preprocessing[module].get("sources", 1),
        )

    def leaves_module(self, segment: str) -> bool:
        """Whether the segment's output goes to another module, through an exchange."""
        above = self.downstream[segment]
        return above is not None and above.module != self.segments[segment].plan.module

    def runs(self, segment: str, bucket: int) -> bool:
        """Encoders do not run in buckets without their items."""
        return self.plan.buckets[bucket].items(self.segments[segment].plan.module) > 0

    # ---- compiling ----

    def compile(
        self,
        on_progress: Callable[[int, int], None] | None = None,
        sync: Callable[[], None] = lambda: None,
    ) -> int:
        """Compile everything that runs on this process, several programs at a time; returns how
        many there are.

        Processes that run the same programs compile a part of them each; after `sync`, which waits
        for the others, they find the rest in the compilation cache, if there is one.
        """
        jobs: dict[Any, Job] = {}
        for b in range(len(self.plan.buckets)):
            for name in self.segments:
                if self.runs(name, b) and name in self.local:
                    jobs |= self._bucket_jobs(name, b)
        for name, u in self.updates.items():
            if name not in self.local:
                continue
            jobs[name, REDUCE] = u.lower_reduce
            jobs[name, UPDATE] = partial(u.lower_update, len(self.updates))
        mine = {key for i, key in enumerate(jobs) if self._compiles_first(key, i)}
        for keys in (mine, jobs.keys() - mine):
            # Tracing is serial anyway (it holds the GIL); XLA compiles in parallel.
            with ThreadPoolExecutor(4) as pool:
                running = {k: pool.submit(jobs[k]().compile) for k in jobs if k in keys}
                for key, job in running.items():
                    self._compiled[key] = job.result()
                    if on_progress:
                        on_progress(len(self._compiled), len(jobs))
            sync()
        return len(jobs)

    def _compiles_first(self, key: Any, i: int) -> bool:
        """Whether job number `i` is this one's among the processes that have it."""
        name = key[1] if key[0] == "exchange" else key[0]
        sharing = sorted({d.process_index for d in self.segments[name].mesh.devices.flat})
        return sharing[i % len(sharing)] == jax.process_index()

    def _bucket_jobs(self, name: str, b: int) -> dict[Any, Job]:
        segment, shape = self.segments[name], self.signature(name, b).shape
        directions = [FORWARD] if name != self.final or self.evaluates else []
        directions += [BACKWARD] if name in self.backward else []
        jobs: dict[Any, Job] = {
            (name, shape, d): partial(segment.lower, shape, d) for d in directions
        }
        if self.leaves_module(name):
            key, exchange = self._exchange_key(name, b), self.exchange(name, b)
            for backward in (False, True) if name in self.backward else (False,):
                jobs[*key, backward] = partial(exchange.lower, backward=backward)
        return jobs

    def _exchange_key(self, below: str, bucket: int) -> tuple[Any, ...]:
        above = self.downstream[below]
        assert above is not None
        low, high = self.signature(below, bucket).shape, self.signature(above.name, bucket).shape
        return ("exchange", below, low, high)

    # A program on devices of other processes only is not run here: its outputs are arrays of which
    # this process holds nothing.

    def of_segment(self, name: str, bucket: int, direction: str) -> Program:
        if name not in self.local:
            return self._elsewhere(name, bucket, direction)
        return self._compiled[name, self.signature(name, bucket).shape, direction]

    def of_exchange(self, below: str, bucket: int, *, backward: bool) -> Program:
        if below not in self.local:
            return self._elsewhere(below, bucket, "scatter" if backward else "gather")
        return self._compiled[*self._exchange_key(below, bucket), backward]

    def of_update(self, name: str, direction: str) -> Program:
        if name not in self.local:
            return self._elsewhere(name, 0, direction)
        return self._compiled[name, direction]

    def _skipped(self, name: str, bucket: int, kind: str) -> Program:
        structs: Any
        if kind in (FORWARD, BACKWARD):
            structs = self.segments[name].output_structs(self.signature(name, bucket).shape, kind)
        elif kind in (REDUCE, UPDATE):
            update = self.updates[name]
            structs = update.reduced_structs() if kind == REDUCE else update.updated_structs()
        else:
            exchange = self.exchange(name, bucket)
            structs = exchange.block_structs if kind == "gather" else exchange.features
        outputs = jax.tree.map(absent, structs)
        return lambda *_: outputs

    # ---- steps ----

    def order(self, buckets: Sequence[int], evaluate: bool) -> tuple[StepGraph, tuple[Task, ...]]:
        """Task graph of a step whose groups use `buckets`, and the order to dispatch it in."""
        return self._order(tuple(buckets), evaluate)

    def _ordered(
        self, buckets: tuple[int, ...], evaluate: bool
    ) -> tuple[StepGraph, tuple[Task, ...]]:
        graph = step_graph(self.plan, buckets, self.trainable, evaluate=evaluate)
        return graph, order_tasks(self.plan, graph)

    def empty_group(self, bucket: int) -> GroupArrays:
        """A group of microbatches that hold no sample."""
        fields: dict[str, dict[str, np.ndarray]] = {}
        sources: dict[str, tuple[np.ndarray, ...]] = {}
        for name, s in self.segments.items():
            if self.runs(name, bucket):
                structs = self.signature(name, bucket).fields
                fields.setdefault(s.plan.module, {}).update(
                    {n: np.zeros(a.shape, a.dtype) for n, a in structs.items()}
                )
                if self.leaves_module(name):
                    sources[s.plan.module] = tuple(
                        np.full(a.shape, -(a.dtype == np.int32), a.dtype)
                        for a in self.exchange(name, bucket).source_structs
                    )
        return GroupArrays(bucket, fields, sources)

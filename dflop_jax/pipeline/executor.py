"""Runs a plan: compiles every program ahead, then dispatches each step's tasks in one order.

One thread dispatches everything asynchronously, in the order of `pipeline.order`; arrays are the
only synchronisation. After `compile` and `calibrate` a step compiles nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dflop_jax.contract import MultimodalModel
from dflop_jax.pipeline.communicator import Communicator, place, zeros
from dflop_jax.pipeline.exchange import lower_exchange, visual_struct
from dflop_jax.pipeline.order import (
    StepGraph,
    downstream,
    order_tasks,
    resources,
    step_graph,
    with_backward,
)
from dflop_jax.pipeline.segment import make_segments, module_shape
from dflop_jax.pipeline.update import SegmentUpdate
from dflop_jax.pipeline.watcher import Observation, Watcher, to_events
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, ModuleShape, Plan, Task, Trace

Tree = Any


@dataclass(frozen=True)
class GroupArrays:
    """Host arrays of one group: `fields[module][name]` are [M, ranks * items, ...]."""

    bucket: int
    fields: Mapping[str, Mapping[str, np.ndarray]]
    visual_index: np.ndarray


@dataclass(frozen=True)
class StepResult:
    """Sums over the batch by name ("loss_sum", ...), the global gradient norm and the trace."""

    sums: dict[str, float]
    grad_norm: float
    trace: Trace
    started_s: float
    ended_s: float


class Executor:
    """A model's parameters and optimizer state on their submeshes, and the programs on them."""

    def __init__(
        self,
        model: MultimodalModel,
        plan: Plan,
        tx: optax.GradientTransformation,
        *,
        devices: list[jax.Device] | None = None,
        clip_norm: float = 0.0,
        freeze: tuple[str, ...] = (),
        remat_layers: bool = False,
        evaluates: bool = False,
    ):
        self.model, self.plan, self.evaluates = model, plan, evaluates
        devices = list(jax.devices()) if devices is None else devices
        self.segments = make_segments(
            model, plan, devices, freeze=freeze, remat_layers=remat_layers
        )
        self.trainable = tuple(n for n, s in self.segments.items() if s.trainable)
        self.backward = with_backward(plan, self.trainable)
        self.updates = {n: SegmentUpdate(self.segments[n], tx, clip_norm) for n in self.trainable}
        self.communicator = Communicator()
        self.final = plan.segments[-1].name
        self._resource = resources(plan)
        self._submesh = {s.name: s.submesh for s in plan.segments}
        self._downstream = {s.name: downstream(plan, s) for s in plan.segments}
        self._programs: dict[Any, Any] = {}
        self._zero_visual: dict[ModuleShape, dict[str, jax.Array]] = {}
        self._orders: dict[tuple[tuple[int, ...], bool], tuple[StepGraph, tuple[Task, ...]]] = {}
        self._watcher = Watcher(set(self._resource.values()))
        self._free_s: dict[int, float] = {}
        self.params: dict[str, Tree] = {}
        self.opt_state: dict[str, Tree] = {}
        self.grads: dict[str, Tree] = {}

    # ---- set-up ----

    def init(self, seed: int) -> None:
        """Fresh parameters, optimizer state and zero gradients; the same for any plan."""
        modules = list(self.model.modules)
        for name, s in self.segments.items():
            key = jax.random.fold_in(jax.random.key(seed), modules.index(s.plan.module))
            shardings = jax.tree.map(lambda p, s=s: s.sharding(*p), s.param_specs())
            self.params[name] = jax.jit(s.init, out_shardings=shardings)(key)
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Fresh optimizer state for the current parameters."""
        for name in self.trainable:
            self.opt_state[name] = self.updates[name].init_state(self.params[name])
            self.grads[name] = jax.tree.map(zeros, self.segments[name].grad_structs())

    def shape_of(self, segment: str, bucket: int) -> ModuleShape:
        module = self.segments[segment].plan.module
        return module_shape(self.model, module, self.plan.buckets[bucket])

    def compile(self, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Compile every program of the plan, several at a time; returns how many."""
        jobs: dict[Any, Callable[[], jax.stages.Lowered]] = {}
        for b, bucket in enumerate(self.plan.buckets):
            for name, s in self.segments.items():
                if s.plan.module != "llm" and bucket.tiles == 0:
                    continue
                shape = self.shape_of(name, b)
                for direction in self._directions(name):
                    jobs[name, shape, direction] = partial(s.lower, shape, direction)
                above = self._downstream[name]
                if above is not None and above.module != s.plan.module:
                    self._exchange_jobs(jobs, name, above.name, b)
        for name, u in self.updates.items():
            jobs[name, REDUCE] = u.lower_reduce
            jobs[name, UPDATE] = partial(u.lower_update, len(self.updates))
        # Tracing is serial anyway (it holds the GIL); XLA compiles in parallel.
        with ThreadPoolExecutor(4) as pool:
            running = {k: pool.submit(lower().compile) for k, lower in jobs.items()}
            for i, (key, job) in enumerate(running.items()):
                self._programs[key] = job.result()
                if on_progress:
                    on_progress(i + 1, len(jobs))
        return len(jobs)

    def _directions(self, name: str) -> tuple[str, ...]:
        if name == self.final:
            return (BACKWARD, FORWARD) if self.evaluates else (BACKWARD,)
        return (FORWARD, BACKWARD) if name in self.backward else (FORWARD,)

    def _exchange_jobs(self, jobs: dict[Any, Any], below: str, above: str, b: int) -> None:
        low, high = self.shape_of(below, b), self.shape_of(above, b)
        features = self.segments[below].y_structs(low)
        rows = self.segments[above].data_ranks * high.items
        for backward in (False, True) if below in self.backward else (False,):
            jobs["exchange", below, low, high, backward] = partial(
                lower_exchange, features, rows, high.tokens, backward=backward
            )

    # ---- one step ----

    def order(self, buckets: Sequence[int], evaluate: bool) -> tuple[StepGraph, tuple[Task, ...]]:
        key = (tuple(buckets), evaluate)
        if key not in self._orders:
            graph = step_graph(self.plan, buckets, self.trainable, evaluate=evaluate)
            if len(self._orders) > 256:
                self._orders.clear()
            self._orders[key] = (graph, order_tasks(self.plan, graph))
        return self._orders[key]

    def run_step(self, step: int, groups: Sequence[GroupArrays], scale: float) -> StepHandle:
        """Dispatch a training step; `scale` multiplies every token's loss. Does not wait."""
        return self._run(step, groups, scale, evaluate=False)

    def run_evaluation(self, groups: Sequence[GroupArrays]) -> StepHandle:
        """Dispatch the forward tasks of a batch: the same sums, no gradient."""
        return self._run(-1, groups, 1.0, evaluate=True)

    def _run(
        self, step: int, groups: Sequence[GroupArrays], scale: float, *, evaluate: bool
    ) -> StepHandle:
        graph, order = self.order([g.bucket for g in groups], evaluate)
        call = _StepCall(self, groups, scale)
        seen = []
        for task in order:
            outputs = call.run(task)
            resource = self._resource[self._submesh[task.segment]]
            seen.append(self._watcher.watch(resource, task, outputs))
        return StepHandle(self, step, graph, seen, call)

    # ---- measuring ----

    def calibrate(self, repeats: int = 3) -> dict[Task, float]:
        """Seconds of each (segment, bucket, direction), a task whose `group` is the bucket index.

        Runs every program on empty microbatches, alone and awaited: gradients stay zero. It also
        warms up every transfer, so that steps compile nothing. Minimum of `repeats` runs.
        """
        times: dict[Task, float] = {}
        for b in range(len(self.plan.buckets)):
            group = self.empty_group(b)
            modes = (False, True) if self.evaluates else (False,)
            for evaluate in modes:
                _, order = self.order([b], evaluate)
                for _ in range(repeats):
                    call = _StepCall(self, [group], 0.0)
                    for task in order:
                        if task.direction in (REDUCE, UPDATE):
                            continue
                        call.settle()
                        start = time.perf_counter()
                        jax.block_until_ready(call.run(task))
                        took = time.perf_counter() - start
                        key = Task(task.segment, b, task.direction)
                        times[key] = min(took, times.get(key, took))
        for name in self.updates:
            zero = zeros(
                jax.ShapeDtypeStruct((), jnp.float32, sharding=self.segments[name].sharding())
            )
            for other in self.updates.values():
                jax.block_until_ready(self.communicator.send(zero, other.segment.sharding()))
        return times

    def empty_group(self, bucket: int) -> GroupArrays:
        """A group of microbatches that hold no sample."""
        fields: dict[str, dict[str, np.ndarray]] = {}
        for name, s in self.segments.items():
            if s.plan.module == "llm" or self.plan.buckets[bucket].tiles > 0:
                structs = s.field_structs(self.shape_of(name, bucket))
                fields.setdefault(s.plan.module, {}).update(
                    {n: np.zeros(a.shape, a.dtype) for n, a in structs.items()}
                )
        high = module_shape(self.model, "llm", self.plan.buckets[bucket])
        rows = self.plan.data_ranks("llm") * high.items
        index = np.full((self.plan.group_size, rows, high.tokens), -1, np.int32)
        return GroupArrays(bucket, fields, index)

    def close(self) -> None:
        self._watcher.close()


class _StepCall:
    """The arrays in flight of one step, and what each task does with them."""

    def __init__(self, ex: Executor, groups: Sequence[GroupArrays], scale: float):
        self.ex, self.groups = ex, groups
        self.scale = place(np.asarray(scale, np.float32), ex.segments[ex.final].sharding())
        self.inbox: dict[tuple[str, int, str], Tree] = {}
        self.kept: dict[tuple[str, int], tuple[Tree, Tree]] = {}
        self.index: dict[tuple[str, int], jax.Array] = {}
        self.reduced: dict[str, tuple[Tree, jax.Array]] = {}
        self.sums: list[dict[str, jax.Array]] = []
        self.norm: jax.Array | None = None

    def settle(self) -> None:
        """Wait until everything in flight is there (for calibration)."""
        jax.block_until_ready((self.inbox, self.kept, self.ex.grads))

    def run(self, task: Task) -> Tree:
        """Dispatch a task; returns outputs to wait for."""
        if task.direction == REDUCE:
            return self._reduce(task.segment)
        if task.direction == UPDATE:
            return self._update(task.segment)
        if task.direction == FORWARD:
            return self._forward(task.segment, task.group)
        return self._backward(task.segment, task.group)

    def _inputs(self, name: str, g: int) -> tuple[Tree, Tree]:
        ex, group = self.ex, self.groups[g]
        s, shape = ex.segments[name], ex.shape_of(name, group.bucket)
        host = group.fields[s.plan.module]
        fields = {n: place(host[n], a.sharding) for n, a in s.field_structs(shape).items()}
        structs = s.x_structs(shape)
        if not structs:
            return {}, fields
        (kind,) = structs
        x = self.inbox.pop((name, g, kind), None)
        if x is None:  # no encoder ran for this group: text only
            if shape not in ex._zero_visual:
                ex._zero_visual[shape] = jax.tree.map(zeros, structs)
            return ex._zero_visual[shape], fields
        return {kind: x}, fields

    def _forward(self, name: str, g: int) -> Tree:
        ex, bucket = self.ex, self.groups[g].bucket
        shape = ex.shape_of(name, bucket)
        x, fields = self._inputs(name, g)
        y = ex._programs[name, shape, FORWARD](ex.params[name], x, fields)
        if name in ex.backward:
            self.kept[name, g] = (x, fields)
        above = ex._downstream[name]
        if above is None:
            self.sums.append(y)
            return y
        target = ex.segments[above.name].x_structs(ex.shape_of(above.name, bucket))
        ((kind, struct),) = target.items()
        out = y
        if kind == "visual":
            out = self._exchange(name, above.name, g, y, backward=False)
        self.inbox[above.name, g, kind] = ex.communicator.send(out, struct.sharding)
        return y

    def _exchange(
        self, below: str, above: str, g: int, array: jax.Array, *, backward: bool
    ) -> jax.Array:
        ex, group = self.ex, self.groups[g]
        low, high = ex.shape_of(below, group.bucket), ex.shape_of(above, group.bucket)
        if (below, g) not in self.index:
            self.index[below, g] = place(group.visual_index, ex.segments[below].sharding())
        program = ex._programs["exchange", below, low, high, backward]
        return program(array, self.index[below, g])

    def _backward(self, name: str, g: int) -> Tree:
        ex, bucket = self.ex, self.groups[g].bucket
        shape = ex.shape_of(name, bucket)
        if name == ex.final:
            (x, fields), dy = self._inputs(name, g), self.scale
        else:
            (x, fields), dy = self.kept.pop((name, g)), self.inbox.pop((name, g, "dy"))
        sums, dx, grads, done = ex._programs[name, shape, BACKWARD](
            ex.params[name], x, fields, dy, ex.grads.get(name, {})
        )
        if name in ex.grads:
            ex.grads[name] = grads
        if sums:
            self.sums.append(sums)
        for kind, array in dx.items():
            self._send_gradient(name, g, kind, array)
        return done

    def _send_gradient(self, name: str, g: int, kind: str, dx: jax.Array) -> None:
        ex, bucket = self.ex, self.groups[g].bucket
        for below in ex.backward:
            above = ex._downstream[below]
            encodes = ex.segments[below].plan.module != "llm"
            if (
                above is None
                or above.name != name
                or (encodes and ex.plan.buckets[bucket].tiles == 0)
            ):
                continue
            y = ex.segments[below].y_structs(ex.shape_of(below, bucket))
            if kind == "visual":
                wire = visual_struct(y, dx.shape[1], dx.shape[2])
                dx = ex.communicator.send(dx, wire.sharding)
                dy = self._exchange(below, name, g, dx, backward=True)
            else:
                dy = ex.communicator.send(dx, y.sharding)
            self.inbox[below, g, "dy"] = dy

    def _reduce(self, name: str) -> Tree:
        ex = self.ex
        grads, squares, ex.grads[name] = ex._programs[name, REDUCE](ex.grads[name])
        self.reduced[name] = (grads, squares)
        return squares

    def _update(self, name: str) -> Tree:
        ex, here = self.ex, self.ex.segments[name].sharding()
        squares = tuple(ex.communicator.send(sq, here) for _, sq in self.reduced.values())
        free = {p: ex.params[name][p] for p in ex.params[name] if p in ex.segments[name].trainable}
        new, ex.opt_state[name], norm = ex._programs[name, UPDATE](
            free, ex.opt_state[name], self.reduced[name][0], squares
        )
        ex.params[name] = {**ex.params[name], **new}
        self.norm = norm
        return norm


class StepHandle:
    """A dispatched step; `result` waits for it."""

    def __init__(
        self, ex: Executor, step: int, graph: StepGraph, seen: list[Observation], call: _StepCall
    ):
        self._ex, self._step, self._graph, self._seen, self._call = ex, step, graph, seen, call

    def result(self) -> StepResult:
        """Wait for the step.

        Raises:
          RuntimeError: the backend failed while running a task.
        """
        for o in self._seen:
            o.wait()
        ex = self._ex
        origin, events = to_events(
            self._seen, ex._submesh, ex._resource, self._graph.waits_for, ex._free_s
        )
        sums: dict[str, float] = {}
        for group in self._call.sums:
            for k, v in group.items():
                sums[k] = sums.get(k, 0.0) + float(np.asarray(v, np.float64).sum())
        norm = 0.0 if self._call.norm is None else float(self._call.norm)
        trace = Trace(self._step, "measured", events)
        return StepResult(sums, norm, trace, origin, origin + trace.makespan_s)

"""One step in flight: what each task does with the arrays, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from dflop_jax.pipeline import task_times
from dflop_jax.pipeline.communicator import place, send
from dflop_jax.pipeline.programs import GroupArrays, Programs, forward_kind
from dflop_jax.pipeline.state import State, share_tied
from dflop_jax.pipeline.task_times import Spans, TaskOrder, TaskTimes
from dflop_jax.pipeline.watcher import Observation, Outputs
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Group, Task, Trace
from dflop_jax.tasks.graph import Link, StepGraph, fed_by

Tree = Any


@dataclass(frozen=True)
class StepResult:
    """Sums over the batch by f"{module}.{name}" (as "MODULE.loss_sum"), the global gradient norm,
    the trace, and what every process saw.

    Attributes:
      applied: the parameters were updated; not where the norm is above `norm_limit` or not finite.
      not_finite: modules whose gradients are not, in the order in which backward comes to them.
    """

    sums: dict[str, float]
    grad_norm: float
    trace: Trace
    started_s: float
    ended_s: float
    seen: list[TaskTimes]
    applied: bool = True
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalResult:
    """One process's part of a step: the tasks on its devices, in seconds of its
    `time.perf_counter`; sums over its part of the batch; sums of squares of the gradients of the
    segments on its devices, and of all segments, None when it does not know."""

    spans: Spans
    sums: dict[str, float]
    squares: dict[str, float]
    total_squares: float | None


class StepCall:
    """Dispatches the tasks of one step, in the order that it is given them.

    `scales` multiply the losses of modules; a module without one has none. Parameters stay as they
    are where the global gradient norm is above `norm_limit` or not finite.
    """

    def __init__(
        self,
        programs: Programs,
        state: State,
        groups: Sequence[Group],
        arrays: Sequence[GroupArrays],
        scales: Mapping[str, float],
        *,
        norm_limit: float = math.inf,
        evaluate: bool = False,
    ):
        assert len(groups) == len(arrays), (len(groups), len(arrays))
        self.programs, self.state = programs, state
        self.groups, self.arrays, self.evaluate = groups, arrays, evaluate
        self.scales = {
            n: place(np.asarray(scales.get(s.plan.module, 0.0), np.float32), s.sharding())
            for n, s in programs.segments.items()
            if s.has_loss
        }
        self.limit = np.asarray(min(norm_limit**2, np.finfo(np.float32).max), np.float32)
        self.fed_by = fed_by(groups)
        # (segment, group, input) -> parts that have arrived; (link, source group, target group) ->
        # the gradient that came back; (segment, group) -> inputs and residuals kept for
        # backward.
        self.inbox: dict[tuple[str, int, str], list[jax.Array]] = {}
        self.returned: dict[tuple[Link, int], Tree] = {}
        self.kept: dict[tuple[str, int], tuple[Tree, Tree, Tree]] = {}
        self.places: dict[tuple[str, str, int], list[Tree]] = {}  # by round
        self.reduced: dict[str, tuple[Tree, jax.Array]] = {}
        self.sums: list[dict[str, jax.Array]] = []
        self.totals: list[jax.Array] = []  # sums of squares of all segments, one a trained segment

    def run(self, task: Task) -> Outputs:
        """Dispatch a task; returns what to wait for."""
        if task.direction == REDUCE:
            return Outputs((), self._reduce(task.segment), ())
        if task.direction == UPDATE:
            return Outputs((), self._update(task.segment), ())
        if task.direction == FORWARD:
            return self._forward(task.segment, task.group)
        return self._backward(task.segment, task.group)

    def settle(self) -> None:
        """Wait until everything in flight is there."""
        flying = (self.inbox, self.returned, self.kept, self.places)
        jax.block_until_ready([[*by_key.values()] for by_key in flying])
        jax.block_until_ready((self.state.grads, self.state.shared))

    # ---- inputs ----

    def _inputs(self, name: str, g: int) -> tuple[Tree, Tree]:
        """What a task reads; nothing where its programs run on other processes only."""
        signature = self.programs.signature(name, self.groups[g].shape)
        arrived = {kind: self.inbox.pop((name, g, kind), []) for kind in signature.x}
        if name not in self.programs.local:
            return {}, {}
        host = self.arrays[g].fields
        fields = {n: place(host[n], a.sharding) for n, a in signature.fields.items()}
        x = {
            kind: self.programs.add(name, parts, struct) if parts else self.state.zero(struct)
            for (kind, struct), parts in zip(signature.x.items(), arrived.values(), strict=True)
        }
        return x, fields

    def _fed(self, link: Link, g: int) -> int | None:
        """The group that a link takes a group's output to; None: this group has none there."""
        if link.edge is None:
            return g
        return next(
            (f for f in self.groups[g].feeds if self.groups[f].module == link.edge.target), None
        )

    def collect(self, name: str, g: int) -> None:
        """Send the packer's places of a group's outputs to the segment that its forward task will
        ask for them; nothing that is under way already."""
        for link in self.programs.out_of[name]:
            fed = self._fed(link, g)
            key = (name, link.target, g)
            if link.edge is None or fed is None or key in self.places:
                continue
            exchange = self.programs.exchange(link, self.groups[g].shape, self.groups[fed].shape)
            arrays, structs = self.arrays[fed], exchange.source_structs
            self.places[key] = [
                exchange.collect_sources(
                    [place(host, s.sharding) for host, s in zip(one, structs, strict=True)]
                )
                for one in exchange.routes.route(arrays.places[g], arrays.most.get(g))
            ]

    # ---- tasks of groups ----

    def _forward(self, name: str, g: int) -> Outputs:
        programs, group = self.programs, self.groups[g]
        x, fields = self._inputs(name, g)
        kind = forward_kind(programs, name, evaluate=self.evaluate)
        y = programs.of_segment(name, group, kind)(self.state.program_params(name), x, fields)
        residuals = y.pop("residuals", {})
        if name in programs.backward and not self.evaluate:
            self.kept[name, g] = (x, fields, residuals)
        self._add_sums(name, y.pop("sums", None))
        self.collect(name, g)
        sent: list[Any] = []
        for link in programs.out_of[name]:
            fed = self._fed(link, g)
            if fed is None:
                continue
            if link.edge is None:
                wanted = programs.signature(link.target, group.shape).x["hidden"].sharding
                self._deliver(link.target, fed, "hidden", send(y["next"], wanted))
                continue
            shapes = group.shape, self.groups[fed].shape
            features = y["taps"][link.edge.tap] if link.edge.tap else y["exit"]
            gather = programs.of_exchange(link, *shapes, backward=False)
            for one in self.places[name, link.target, g]:
                blocks = gather(features, one)
                arrived = programs.exchange(link, *shapes).deliver(blocks)
                self._deliver(link.target, fed, link.edge.name, arrived)
                sent.append(blocks)
        return Outputs((), y, sent)

    def _deliver(self, name: str, g: int, kind: str, array: jax.Array) -> None:
        self.inbox.setdefault((name, g, kind), []).append(array)

    def _backward(self, name: str, g: int) -> Outputs:
        state = self.state
        kept = self.kept.pop((name, g), None)
        x, fields, residuals = (*self._inputs(name, g), {}) if kept is None else kept
        program = self.programs.of_segment(name, self.groups[g], BACKWARD)
        dy, received = self._gradient_of_output(name, g)
        sums, dx, grads, done = program(
            state.program_params(name),
            x,
            fields,
            dy,
            state.grads.get(name, {}),
            residuals,
        )
        if name in state.grads:
            state.grads[name] = grads
        self._add_sums(name, sums)
        for link in self.programs.into[name]:
            if link.source in self.programs.backward:
                self._send_gradient(link, g, dx)
        return Outputs(received, done, ())

    def _add_sums(self, name: str, sums: Tree) -> None:
        module = self.programs.segments[name].plan.module
        if sums:
            self.sums.append({f"{module}.{k}": v for k, v in sums.items()})

    def _gradient_of_output(self, name: str, g: int) -> tuple[Tree, list[jax.Array]]:
        """Cotangents of what the segment gives, zeros where this group's output is not read; and
        what to wait for until exchanges have brought them."""
        programs, shape = self.programs, self.groups[g].shape
        dy: Tree = {}
        arrived: list[jax.Array] = []
        if name in self.scales:
            dy["sums"] = self.scales[name]
        by_output: dict[str, list[jax.Array]] = {}
        for link in programs.out_of[name]:
            fed = self._fed(link, g)
            if fed is None:
                continue
            received = self.returned.pop((link, g))
            if link.edge is None:
                dy["next"] = received
                continue
            scatter = programs.of_exchange(link, shape, self.groups[fed].shape, backward=True)
            for one in self.places[name, link.target, g]:
                part, done = scatter(received, one)
                by_output.setdefault(link.edge.tap, []).append(part)
                arrived.append(done)
        for key in [k for k in self.places if k[0] == name and k[2] == g]:
            del self.places[key]
        structs = programs.signature(name, shape).y
        for kind, struct in structs.get("taps", {}).items():
            dy.setdefault("taps", {})[kind] = self._total(name, by_output.get(kind), struct)
        if "exit" in structs:
            dy["exit"] = self._total(name, by_output.get(""), structs["exit"])
        return dy, arrived

    def _total(
        self, name: str, parts: list[jax.Array] | None, struct: jax.ShapeDtypeStruct
    ) -> jax.Array:
        return self.programs.add(name, parts, struct) if parts else self.state.zero(struct)

    def _send_gradient(self, link: Link, g: int, dx: Tree) -> None:
        """The gradient of what a link brought, to all groups that it came from."""
        programs, shape = self.programs, self.groups[g].shape
        if link.edge is None:
            wanted = programs.signature(link.source, shape).y["next"].sharding
            self.returned[link, g] = send(dx["hidden"], wanted)
            return
        for source in self.fed_by.get((g, link.edge.source), []):
            exchange = programs.exchange(link, self.groups[source].shape, shape)
            self.returned[link, source] = exchange.collect(dx[link.edge.name])

    # ---- the step's end ----

    def _reduce(self, name: str) -> Tree:
        programs, state = self.programs, self.state
        more: Tree = {}
        reader = programs.reader_of.get(name)
        if reader is not None and programs.updates[name].adds_shared:
            wanted = programs.updates[name].shard_structs()["entry"]
            more = {
                "entry": jax.tree.map(
                    lambda g, w: send(g, w.sharding),
                    self.reduced[reader][0]["entry"],
                    wanted,
                )
            }
        program = programs.of_update(name, REDUCE)
        grads, squares, state.grads[name] = program(state.grads[name], more)
        self.reduced[name] = (grads, squares)
        return squares

    def _update(self, name: str) -> Tree:
        state, segment, update = self.state, self.programs.segments[name], self.programs.updates
        here = segment.sharding()
        squares = tuple(send(sq, here) for _, sq in self.reduced.values())
        params = state.params[name]
        own = [p for p in segment.own_parts if p in segment.trainable]
        grads = {p: self.reduced[name][0][p] for p in own}
        if own:
            held = {p: params[p] for p in own}, state.masters[name], state.opt_state[name]
            update_program = self.programs.of_update(name, UPDATE)
            limit = place(self.limit, here)
            new, *rest, total = update_program(*held, grads, squares, limit)
            state.masters[name], state.opt_state[name] = rest
            state.params[name] = {**params, **new}
            self.totals.append(total)
        # Not kept until the step is read, which is after the next one was dispatched.
        self.reduced[name] = ({}, self.reduced[name][1])
        if update[name].shared:
            share_tied(self.programs, state, name)
        return state.shared[name] if not own else total


class StepHandle:
    """A dispatched step; `local` and `result` wait for it."""

    def __init__(
        self,
        step: int,
        call: StepCall,
        graph: StepGraph,
        order: Sequence[Task],
        seen: Mapping[int, Observation],
        free_s: dict[int, float],
    ):
        self._step, self._call, self._graph = step, call, graph
        self._order, self._seen, self._free_s = order, seen, free_s

    @cached_property
    def order(self) -> TaskOrder:
        """The step's tasks."""
        return TaskOrder.of(self._order, self._graph.waits_for, self._call.programs.resource)

    def local(self) -> LocalResult:
        """Wait for this process's part of the step.

        Raises:
          RuntimeError: the backend failed while running a task.
        """
        for o in self._seen.values():
            o.wait()
        call = self._call
        sums: dict[str, float] = {}
        for group in call.sums:
            for k, v in group.items():
                # One of the replicas of each piece, so that the processes' sums add up.
                held = [s.data for s in v.addressable_shards if s.replica_id == 0]
                total = sum(float(np.asarray(a, np.float64).sum()) for a in held)
                sums[k] = sums.get(k, 0.0) + total
        squares = {
            name: float(of_segment.addressable_data(0))
            for name, (_, of_segment) in call.reduced.items()
            if of_segment.addressable_shards
        }
        totals = [float(t.addressable_data(0)) for t in call.totals if t.addressable_shards]
        spans = Spans.of({i: o.moments for i, o in self._seen.items()})
        return LocalResult(spans, sums, squares, totals[0] if totals else None)

    def result(
        self, parts: Sequence[LocalResult] | None = None, offsets_s: Sequence[float] = (0.0,)
    ) -> StepResult:
        """The whole step, from what every process saw (whose clocks lack `offsets_s` to this one);
        from this one's part alone when it is the only process."""
        parts = [self.local()] if parts is None else parts
        sums: dict[str, float] = {}
        for part in parts:
            for k, v in part.sums.items():
                sums[k] = sums.get(k, 0.0) + v
        seen = task_times.gathered([part.spans for part in parts], offsets_s)
        n = len(self._order)
        # A task over several processes begins with the last to dispatch it.
        dispatched_s = task_times.latest_s(seen, task_times.DISPATCHED, n).tolist()
        end_s = task_times.latest_s(seen, task_times.END, n).tolist()
        submesh_of = self._call.programs.submesh
        origin, events = task_times.to_events(
            self.order, dispatched_s, end_s, submesh_of, self._free_s
        )
        trace = Trace(self._step, "measured", events)
        squares = {name: value for part in parts for name, value in part.squares.items()}
        not_finite = dict.fromkeys(
            segment.plan.module
            for name, segment in reversed(self._call.programs.segments.items())
            if not math.isfinite(squares.get(name, 0.0))
        )
        totals = (part.total_squares for part in parts)
        total = next((t for t in totals if t is not None), 0.0)
        return StepResult(
            sums,
            math.sqrt(total),
            trace,
            origin,
            origin + trace.makespan_s,
            seen,
            applied=bool(total <= self._call.limit),
            not_finite=tuple(not_finite),
        )

    def own_seconds(self, result: StepResult) -> list[TaskTimes]:
        """What every process took for its tasks (see `task_times.own_seconds`)."""
        return task_times.own_seconds(result.seen, self.order)

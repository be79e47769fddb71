"""One step in flight: what each task does with the arrays, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dflop_jax.pipeline.communicator import Communicator, place, zeros
from dflop_jax.pipeline.order import StepGraph
from dflop_jax.pipeline.programs import GroupArrays, Programs
from dflop_jax.pipeline.watcher import Observation, to_events
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, ModuleShape, Task, Trace

Tree = Any


@dataclass(frozen=True)
class StepResult:
    """Sums over the batch by name ("loss_sum", ...), the global gradient norm and the trace."""

    sums: dict[str, float]
    grad_norm: float
    trace: Trace
    started_s: float
    ended_s: float


@dataclass(frozen=True)
class LocalResult:
    """One process's part of a step: (place in the order, dispatched, ended) of the tasks on its
    devices, in seconds of its `time.perf_counter`; sums over its part of the batch; the global
    gradient norm, 0 when it does not know."""

    spans: tuple[tuple[int, float, float], ...]
    sums: dict[str, float]
    grad_norm: float


@dataclass
class State:
    """What a run carries from step to step, by segment name; steps donate and replace it."""

    params: dict[str, Tree] = field(default_factory=dict)
    opt_state: dict[str, Tree] = field(default_factory=dict)
    grads: dict[str, Tree] = field(default_factory=dict)
    zero_inputs: dict[tuple[str, ModuleShape, str], jax.Array] = field(default_factory=dict)


class StepCall:
    """Dispatches the tasks of one step, in the order that it is given them."""

    def __init__(
        self,
        programs: Programs,
        state: State,
        communicator: Communicator,
        groups: Sequence[GroupArrays],
        scale: float,
    ):
        self.programs, self.state, self.communicator = programs, state, communicator
        self.groups = groups
        final = programs.segments[programs.final]
        self.scale = place(np.asarray(scale, np.float32), final.sharding())
        self.inbox: dict[tuple[str, int, str], Tree] = {}
        self.kept: dict[tuple[str, int], tuple[Tree, Tree]] = {}
        self.sources: dict[tuple[str, int], Tree] = {}
        self.reduced: dict[str, tuple[Tree, jax.Array]] = {}
        self.sums: list[dict[str, jax.Array]] = []
        self.norms: list[jax.Array] = []

    def run(self, task: Task) -> Tree:
        """Dispatch a task; returns outputs to wait for (never donated onwards)."""
        if task.direction == REDUCE:
            return self._reduce(task.segment)
        if task.direction == UPDATE:
            return self._update(task.segment)
        if task.direction == FORWARD:
            return self._forward(task.segment, task.group)
        return self._backward(task.segment, task.group)

    def settle(self) -> None:
        """Wait until everything in flight is there."""
        jax.block_until_ready((self.inbox, self.kept, self.sources, self.state.grads))

    def _inputs(self, name: str, g: int) -> tuple[Tree, Tree]:
        group = self.groups[g]
        signature = self.programs.signature(name, group.bucket)
        host = group.fields[self.programs.segments[name].plan.module]
        fields = {n: place(host[n], a.sharding) for n, a in signature.fields.items()}
        x = {}
        for kind, struct in signature.x.items():
            x[kind] = self.inbox.pop((name, g, kind), None)
            if x[kind] is None:  # an encoder that did not run: the group has no such items
                key = (name, signature.shape, kind)
                if key not in self.state.zero_inputs:
                    self.state.zero_inputs[key] = zeros(struct)
                x[kind] = self.state.zero_inputs[key]
        return x, fields

    def collect(self, name: str, g: int) -> None:
        """Send the packer's arrays of a group to the encoder that its forward task will ask for
        them; nothing if they are under way, or the segment leaves no module."""
        programs = self.programs
        if (name, g) in self.sources or not programs.leaves_module(name):
            return
        exchange = programs.exchange(name, self.groups[g].bucket)
        hosts = self.groups[g].sources[programs.segments[name].plan.module]
        packed = [
            place(host, struct.sharding)
            for host, struct in zip(hosts, exchange.source_structs, strict=True)
        ]
        self.sources[name, g] = exchange.collect_sources(packed)

    def _forward(self, name: str, g: int) -> Tree:
        programs, bucket = self.programs, self.groups[g].bucket
        x, fields = self._inputs(name, g)
        y = programs.of_segment(name, bucket, FORWARD)(self.state.params[name], x, fields)
        if name in programs.backward:
            self.kept[name, g] = (x, fields)
        above = programs.downstream[name]
        if above is None:
            self.sums.append(y)
            return y
        if programs.leaves_module(name):
            self.collect(name, g)
            exchange, module = programs.exchange(name, bucket), programs.segments[name].plan.module
            sources = self.sources[name, g]
            blocks = programs.of_exchange(name, bucket, backward=False)(y, sources)
            self.inbox[above.name, g, module] = exchange.deliver(blocks)
            return blocks
        wanted = programs.signature(above.name, bucket).x["hidden"].sharding
        self.inbox[above.name, g, "hidden"] = self.communicator.send(y, wanted)
        return y

    def _backward(self, name: str, g: int) -> Tree:
        bucket, state = self.groups[g].bucket, self.state
        if name == self.programs.final:
            (x, fields), dy = self._inputs(name, g), self.scale
        else:
            (x, fields), dy = self.kept.pop((name, g)), self._gradient_of_output(name, g)
        program = self.programs.of_segment(name, bucket, BACKWARD)
        sums, dx, grads, done = program(
            state.params[name], x, fields, dy, state.grads.get(name, {})
        )
        if name in state.grads:
            state.grads[name] = grads
        if sums:
            self.sums.append(sums)
        for kind, array in dx.items():
            self._send_gradient(name, g, kind, array)
        return done

    def _gradient_of_output(self, name: str, g: int) -> jax.Array:
        received = self.inbox.pop((name, g, "dy"))
        if not self.programs.leaves_module(name):
            return received
        program = self.programs.of_exchange(name, self.groups[g].bucket, backward=True)
        return program(received, self.sources.pop((name, g)))

    def _send_gradient(self, name: str, g: int, kind: str, dx: jax.Array) -> None:
        """The gradient of what came from below: hidden states, or an encoder's features."""
        programs, bucket = self.programs, self.groups[g].bucket
        for below in programs.backward:
            above = programs.downstream[below]
            if above is None or above.name != name or not programs.runs(below, bucket):
                continue
            dy: Tree
            if programs.leaves_module(below):
                if programs.segments[below].plan.module != kind:
                    continue
                dy = programs.exchange(below, bucket).collect(dx)
            else:
                dy = self.communicator.send(dx, programs.signature(below, bucket).y.sharding)
            self.inbox[below, g, "dy"] = dy

    def _reduce(self, name: str) -> Tree:
        program = self.programs.of_update(name, REDUCE)
        grads, squares, self.state.grads[name] = program(self.state.grads[name])
        self.reduced[name] = (grads, squares)
        return squares

    def _update(self, name: str) -> Tree:
        state, segment = self.state, self.programs.segments[name]
        here = segment.sharding()
        squares = tuple(self.communicator.send(sq, here) for _, sq in self.reduced.values())
        params = state.params[name]
        free = {p: tree for p, tree in params.items() if p in segment.trainable}
        new, state.opt_state[name], norm = self.programs.of_update(name, UPDATE)(
            free, state.opt_state[name], self.reduced[name][0], squares
        )
        state.params[name] = {**params, **new}
        self.norms.append(norm)
        return norm


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
        norm = next((float(n.addressable_data(0)) for n in call.norms if n.addressable_shards), 0.0)
        spans = tuple((i, o.dispatched_s, o.end_s) for i, o in self._seen.items())
        return LocalResult(spans, sums, norm)

    def result(self, parts: Sequence[LocalResult] | None = None) -> StepResult:
        """The whole step, from what every process saw (their clocks made equal); from this one's
        part alone when it is the only process."""
        parts = [self.local()] if parts is None else parts
        when: dict[int, tuple[float, float]] = {}
        sums: dict[str, float] = {}
        for part in parts:
            for i, dispatched_s, end_s in part.spans:
                # A task over several processes begins with the last to dispatch it.
                known = when.get(i, (dispatched_s, end_s))
                when[i] = max(known[0], dispatched_s), max(known[1], end_s)
            for k, v in part.sums.items():
                sums[k] = sums.get(k, 0.0) + v
        programs = self._call.programs
        spans = [(task, *when[i]) for i, task in enumerate(self._order)]
        origin, events = to_events(
            spans, programs.submesh, programs.resource, self._graph.waits_for, self._free_s
        )
        trace = Trace(self._step, "measured", events)
        norm = max((part.grad_norm for part in parts), default=0.0)
        return StepResult(sums, norm, trace, origin, origin + trace.makespan_s)

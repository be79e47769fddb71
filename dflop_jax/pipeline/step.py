"""One step in flight: what each task does with the arrays, and what comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dflop_jax.pipeline.communicator import Communicator, place, zeros
from dflop_jax.pipeline.order import StepGraph
from dflop_jax.pipeline.programs import Programs
from dflop_jax.pipeline.watcher import Observation, to_events
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, ModuleShape, Task, Trace

Tree = Any


@dataclass(frozen=True)
class GroupArrays:
    """Host arrays of one group: `fields[module][name]` are [M, ranks * items, ...]; `visual_index`
    int32 [M, rows, length] counts over a microbatch's visual tokens, -1 elsewhere."""

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


@dataclass
class State:
    """What a run carries from step to step, by segment name; steps donate and replace it."""

    params: dict[str, Tree] = field(default_factory=dict)
    opt_state: dict[str, Tree] = field(default_factory=dict)
    grads: dict[str, Tree] = field(default_factory=dict)
    zero_inputs: dict[tuple[str, ModuleShape], Tree] = field(default_factory=dict)


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
        self.index: dict[tuple[str, int], jax.Array] = {}
        self.reduced: dict[str, tuple[Tree, jax.Array]] = {}
        self.sums: list[dict[str, jax.Array]] = []
        self.norm: jax.Array | None = None

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
        """Wait until everything in flight is there (for calibration)."""
        jax.block_until_ready((self.inbox, self.kept, self.index, self.state.grads))

    def _inputs(self, name: str, g: int) -> tuple[Tree, Tree]:
        group = self.groups[g]
        signature = self.programs.signature(name, group.bucket)
        host = group.fields[self.programs.segments[name].plan.module]
        fields = {n: place(host[n], a.sharding) for n, a in signature.fields.items()}
        if not signature.x:
            return {}, fields
        (kind,) = signature.x
        x = self.inbox.pop((name, g, kind), None)
        if x is not None:
            return {kind: x}, fields
        # No encoder ran for this group: it is text only.
        key = (name, signature.shape)
        if key not in self.state.zero_inputs:
            self.state.zero_inputs[key] = jax.tree.map(zeros, signature.x)
        return self.state.zero_inputs[key], fields

    def _forward(self, name: str, g: int) -> Tree:
        programs, bucket = self.programs, self.groups[g].bucket
        x, fields = self._inputs(name, g)
        y = programs.of_segment(name, bucket, FORWARD)(self.state.params[name], x, fields)
        if name in programs.backward:
            self.kept[name, g] = (x, fields)
        above = programs.downstream[name]
        if above is None:
            self.sums.append(y)
        elif programs.leaves_module(name):
            exchange = programs.exchange(name, bucket)
            index = place(self.groups[g].visual_index, exchange.index_struct.sharding)
            self.index[name, g] = index
            blocks = programs.of_exchange(name, bucket, backward=False)(y, index)
            self.inbox[above.name, g, "visual"] = exchange.deliver(blocks)
        else:
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
        for array in dx.values():
            self._send_gradient(name, g, array)
        return done

    def _gradient_of_output(self, name: str, g: int) -> jax.Array:
        received = self.inbox.pop((name, g, "dy"))
        if not self.programs.leaves_module(name):
            return received
        program = self.programs.of_exchange(name, self.groups[g].bucket, backward=True)
        return program(received, self.index.pop((name, g)))

    def _send_gradient(self, name: str, g: int, dx: jax.Array) -> None:
        programs, bucket = self.programs, self.groups[g].bucket
        for below in programs.backward:
            above = programs.downstream[below]
            if above is None or above.name != name or not programs.runs(below, bucket):
                continue
            dy: Tree
            if programs.leaves_module(below):
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
        new, state.opt_state[name], self.norm = self.programs.of_update(name, UPDATE)(
            free, state.opt_state[name], self.reduced[name][0], squares
        )
        state.params[name] = {**params, **new}
        return self.norm


class StepHandle:
    """A dispatched step; `result` waits for it."""

    def __init__(
        self,
        step: int,
        call: StepCall,
        graph: StepGraph,
        seen: list[Observation],
        free_s: dict[int, float],
    ):
        self._step, self._call, self._graph = step, call, graph
        self._seen, self._free_s = seen, free_s

    def result(self) -> StepResult:
        """Wait for the step.

        Raises:
          RuntimeError: the backend failed while running a task.
        """
        for o in self._seen:
            o.wait()
        programs = self._call.programs
        origin, events = to_events(
            self._seen, programs.submesh, programs.resource, self._graph.waits_for, self._free_s
        )
        sums: dict[str, float] = {}
        for group in self._call.sums:
            for k, v in group.items():
                sums[k] = sums.get(k, 0.0) + float(np.asarray(v, np.float64).sum())
        norm = 0.0 if self._call.norm is None else float(self._call.norm)
        trace = Trace(self._step, "measured", events)
        return StepResult(sums, norm, trace, origin, origin + trace.makespan_s)

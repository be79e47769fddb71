"""One step of a run: the state between steps, and the arrays between tasks, dispatched in order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, REDUCE, UPDATE, Group, Task
from dflop_jax.runtime.communicator import send, shard_array, zeros
from dflop_jax.runtime.parameter_layout import program_structs
from dflop_jax.runtime.programs import LESS_REMAT, GroupArrays, Programs
from dflop_jax.runtime.segment import EVALUATE
from dflop_jax.simulate.task_graph import SegmentLink, feeding_groups

Tree = Any


@dataclass
class TrainState:
    """Parameters, optimizer state and gradients by segment name; steps donate and replace them.

    `masters` is {} for a segment whose optimizer updates the parameters that programs read.
    `shared` has a tied module's entry parameters on the segment that reads them.
    """

    params: dict[str, Tree] = field(default_factory=dict)
    masters: dict[str, Tree] = field(default_factory=dict)
    opt_state: dict[str, Tree] = field(default_factory=dict)
    grads: dict[str, Tree] = field(default_factory=dict)
    shared: dict[str, Tree] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.zeros = cache(zeros)  # made once, never donated

    def program_params(self, name: str) -> Tree:
        """Return the parameters that a segment's programs read."""
        shared = self.shared.get(name)
        return {**self.params[name], "entry": shared} if shared is not None else self.params[name]

    def share_tied(self, programs: Programs, reader: str) -> None:
        """Send a tied module's entry parameters from their owner to the segment that reads them."""
        structs = program_structs(programs.segments[reader])["entry"]
        entry = self.params[programs.owner_of[reader]]["entry"]
        self.shared[reader] = jax.tree.map(
            lambda a, s: send(a, s.sharding, donated=True), entry, structs
        )


class Outputs(NamedTuple):
    """Arrays to wait for, never donated: received by exchange, computed by the program, sent."""

    received: Any
    computed: Any
    sent: Any


class StepCall:
    """One step: its groups, their host arrays, and the device arrays between tasks.

    `scales` are factors of the losses by module; a module without a factor has no loss. If the
    global gradient norm is above `norm_limit` or not finite, parameters stay unchanged.
    """

    def __init__(
        self,
        programs: Programs,
        state: TrainState,
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
        self.limit = np.asarray(min(norm_limit**2, np.finfo(np.float32).max), np.float32)
        # By segment: reduced gradients and the sum of their squares.
        self.reduced: dict[str, tuple[Tree, jax.Array]] = {}
        self.sums: list[dict[str, jax.Array]] = []  # sums of losses, by name
        self.totals: list[jax.Array] = []  # sum of squares over all segments, from each trained one
        self._scales = {
            n: shard_array(np.asarray(scales.get(s.plan.module, 0.0), np.float32), s.sharding())
            for n, s in programs.segments.items()
            if s.has_loss
        }
        self._fed_by = feeding_groups(groups)
        # (segment, group, input) -> terms of the input that have arrived.
        self._inbox: defaultdict[tuple[str, int, str], list[Tree]] = defaultdict(list)
        # (link, source group, reading group) -> the gradient that came back.
        self._returned: dict[tuple[SegmentLink, int, int], Tree] = {}
        # (segment, group) -> inputs and residuals for backward.
        self._for_backward: dict[tuple[str, int], tuple[Tree, Tree, Tree]] = {}
        # (segment, reading segment, group, reading group) -> the exchange's index arrays by round.
        self._sent_indices: dict[tuple[str, str, int, int], list[Tree]] = {}

    def key(self, task: Task) -> tuple[Any, ...]:
        """Return the key of the program that runs a task."""
        name = task.segment
        if task.group == NO_GROUP:
            return name, task.direction
        group, has_loss = self.groups[task.group], self.programs.segments[name].has_loss
        kind = EVALUATE if self.evaluate and has_loss else task.direction
        return (name, group.shape, *[LESS_REMAT] * (name in group.remat_less), kind)

    def run(self, task: Task) -> Outputs:
        """Dispatch a task; return arrays to wait for."""
        if task.direction == FORWARD:
            return self._forward(task)
        if task.direction == BACKWARD:
            return self._backward(task)
        if task.direction == REDUCE:
            return self._reduce(task)
        assert task.direction == UPDATE, task
        return self._update(task)

    def wait_for_pending(self) -> None:
        """Wait until all pending arrays have arrived."""
        flying = (self._inbox, self._returned, self._for_backward, self._sent_indices)
        jax.block_until_ready([[*by_key.values()] for by_key in flying])
        jax.block_until_ready((self.state.grads, self.state.shared))

    def send_indices(self, name: str, g: int) -> None:
        """Send a group's exchange indices to the segment that runs forward, unless sent."""
        for link, fed in self._fed_links(name, g):
            key = (name, link.target, g, fed)
            if link.edge is None or key in self._sent_indices:
                continue
            exchange = self.programs.exchange(link, self.groups[g].shape, self.groups[fed].shape)
            arrays, structs = self.arrays[fed], exchange.source_structs
            rounds = exchange.index.rounds(arrays.source_indices[g], arrays.max_requested.get(g))
            self._sent_indices[key] = [
                tuple(
                    exchange.collect(shard_array(host, s.sharding))
                    for host, s in zip(one_round, structs, strict=True)
                )
                for one_round in rounds
            ]

    # ---- tasks of a group ----

    def _forward(self, task: Task) -> Outputs:
        name, g, programs = task.segment, task.group, self.programs
        x, fields = self._inputs(name, g)
        y = programs.program(self.key(task))(self.state.program_params(name), x, fields)
        residuals = y.pop("residuals", {})
        if name in programs.backward and not self.evaluate:
            self._for_backward[name, g] = (x, fields, residuals)
        self._add_sums(name, y.pop("sums", None))
        self.send_indices(name, g)
        sent: list[Any] = []
        for link, fed in self._fed_links(name, g):
            shape, read_shape = self.groups[g].shape, self.groups[fed].shape
            if link.edge is None:
                wanted = programs.signature(link.target, shape).x["hidden"]
                self._inbox[link.target, fed, "hidden"].append(_send_tree(y["next"], wanted))
                continue
            features = y["taps"][link.edge.tap] if link.edge.tap else y["exit"]
            gather = programs.program((name, link, shape, read_shape, False))
            for one_round in self._sent_indices[name, link.target, g, fed]:
                blocks = gather(features, one_round)
                arrived = programs.exchange(link, shape, read_shape).deliver(blocks)
                self._inbox[link.target, fed, link.edge.name].append(arrived)
                sent.append(blocks)
        return Outputs((), y, sent)

    def _backward(self, task: Task) -> Outputs:
        name, g, state = task.segment, task.group, self.state
        inputs = self._for_backward.pop((name, g), None)
        x, fields, residuals = (*self._inputs(name, g), {}) if inputs is None else inputs
        program = self.programs.program(self.key(task))
        dy, received = self._gradient_of_output(name, g)
        params, grads = state.program_params(name), state.grads.get(name, {})
        sums, dx, grads, completion = program(params, x, fields, dy, grads, residuals)
        if name in state.grads:
            state.grads[name] = grads
        self._add_sums(name, sums)
        for link in self.programs.incoming_links[name]:
            if link.source in self.programs.backward:
                self._send_gradient(link, g, dx)
        return Outputs(received, completion, ())

    def _inputs(self, name: str, g: int) -> tuple[Tree, Tree]:
        """Return (x, fields) of a task; ({}, {}) if its program runs on other processes only."""
        signature = self.programs.signature(name, self.groups[g].shape)
        arrived = {kind: self._inbox.pop((name, g, kind), []) for kind in signature.x}
        if name not in self.programs.local_segments:
            return {}, {}
        host = self.arrays[g].fields
        fields = {n: shard_array(host[n], a.sharding) for n, a in signature.fields.items()}
        x = {kind: self._total(name, arrived[kind], s) for kind, s in signature.x.items()}
        return x, fields

    def _fed_links(self, name: str, g: int) -> list[tuple[SegmentLink, int]]:
        """Return a segment's pairs (link, group that reads the output of group `g` over it)."""
        return [
            (link, f)
            for link in self.programs.outgoing_links[name]
            for f in ((g,) if link.edge is None else self.groups[g].feeds)
            if link.edge is None or self.groups[f].module == link.edge.target
        ]

    def _add_sums(self, name: str, sums: Tree) -> None:
        if sums:
            module = self.programs.segments[name].plan.module
            self.sums.append({f"{module}.{k}": v for k, v in sums.items()})

    def _total(self, name: str, terms: Sequence[Tree], struct: Tree) -> Tree:
        """Return the sum of the arrays that arrived for one input of a segment, or zeros."""
        if not terms:
            return jax.tree.map(self.state.zeros, struct)
        total, *rest = terms
        for term in rest:
            if name in self.programs.local_segments:
                total = self.programs.compiled[name, "sum", struct](total, term)
        return total

    def _gradient_of_output(self, name: str, g: int) -> tuple[Tree, list[jax.Array]]:
        """Return (cotangents of the segment's outputs, zeros if no group reads an output; arrays to
        wait for until the exchanges have finished)."""
        programs, shape = self.programs, self.groups[g].shape
        dy: Tree = {"sums": self._scales[name]} if name in self._scales else {}
        arrived: list[jax.Array] = []
        by_output: defaultdict[str, list[jax.Array]] = defaultdict(list)
        for link, fed in self._fed_links(name, g):
            received = self._returned.pop((link, g, fed))
            if link.edge is None:
                dy["next"] = received
                continue
            scatter = programs.program((name, link, shape, self.groups[fed].shape, True))
            for one_round in self._sent_indices[name, link.target, g, fed]:
                gradient, completion = scatter(received, one_round)
                by_output[link.edge.tap].append(gradient)
                arrived.append(completion)
        for link, fed in self._fed_links(name, g):
            self._sent_indices.pop((name, link.target, g, fed), None)
        structs = programs.signature(name, shape).y
        if "taps" in structs:
            dy["taps"] = {
                tap: self._total(name, by_output[tap], struct)
                for tap, struct in structs["taps"].items()
            }
        if "exit" in structs:
            dy["exit"] = self._total(name, by_output[""], structs["exit"])
        return dy, arrived

    def _send_gradient(self, link: SegmentLink, g: int, dx: Tree) -> None:
        """Send the gradient of a link's input to all groups that it came from."""
        shape = self.groups[g].shape
        if link.edge is None:
            wanted = self.programs.signature(link.source, shape).y["next"]
            self._returned[link, g, g] = _send_tree(dx["hidden"], wanted)
            return
        for source in self._fed_by.get((g, link.edge.source), []):
            exchange = self.programs.exchange(link, self.groups[source].shape, shape)
            self._returned[link, source, g] = exchange.collect(dx[link.edge.name])

    # ---- the step's end ----

    def _reduce(self, task: Task) -> Outputs:
        name, programs, state = task.segment, self.programs, self.state
        more: Tree = {}
        if programs.updates[name].adds_shared:
            reader = next(r for r, owner in programs.owner_of.items() if owner == name)
            entry = self.reduced[reader][0]["entry"]
            more = {"entry": _send_tree(entry, programs.updates[name].shard_structs["entry"])}
        program = programs.program(self.key(task))
        grads, squares, state.grads[name] = program(state.grads[name], more)
        self.reduced[name] = (grads, squares)
        return Outputs((), squares, ())

    def _update(self, task: Task) -> Outputs:
        name, state, segment = task.segment, self.state, self.programs.segments[task.segment]
        sharding = segment.sharding()
        squares = tuple(send(sq, sharding) for _, sq in self.reduced.values())
        params, (reduced, own_squares) = state.params[name], self.reduced[name]
        updated = [p for p in segment.owned_parts if p in segment.trainable]
        completion: Tree = ()
        if updated:
            own_state = {p: params[p] for p in updated}, state.masters[name], state.opt_state[name]
            grads = {p: reduced[p] for p in updated}
            limit = shard_array(self.limit, sharding)
            program = self.programs.program(self.key(task))
            new, *rest, completion = program(*own_state, grads, squares, limit)
            state.masters[name], state.opt_state[name] = rest
            state.params[name] = {**params, **new}
            self.totals.append(completion)
        # Freed now, since the step's result is read after the next step is dispatched.
        self.reduced[name] = ({}, own_squares)
        if self.programs.updates[name].shared:
            state.share_tied(self.programs, name)
        return Outputs((), completion if updated else state.shared[name], ())


def _send_tree(arrays: Tree, wanted: Tree) -> Tree:
    return jax.tree.map(lambda a, struct: send(a, struct.sharding), arrays, wanted)

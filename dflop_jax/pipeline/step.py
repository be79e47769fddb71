"""What each task of a step's groups does with the arrays, dispatched in the order of the tasks."""

from __future__ import annotations

from typing import Any

import jax

from dflop_jax.pipeline.communicator import place, send
from dflop_jax.pipeline.programs import forward_kind
from dflop_jax.pipeline.step_call import StepCall
from dflop_jax.pipeline.step_end import reduce_gradients, update_parameters
from dflop_jax.pipeline.watcher import Outputs
from dflop_jax.records import BACKWARD, FORWARD, REDUCE, UPDATE, Task
from dflop_jax.tasks.graph import Link

Tree = Any


def run_task(call: StepCall, task: Task) -> Outputs:
    """Dispatch a task; returns what to wait for."""
    if task.direction == REDUCE:
        return Outputs((), reduce_gradients(call, task.segment), ())
    if task.direction == UPDATE:
        return Outputs((), update_parameters(call, task.segment), ())
    if task.direction == FORWARD:
        return _forward(call, task.segment, task.group)
    return _backward(call, task.segment, task.group)


def _inputs(call: StepCall, name: str, g: int) -> tuple[Tree, Tree]:
    """What a task reads; nothing where its programs run on other processes only."""
    signature = call.programs.signature(name, call.groups[g].shape)
    arrived = {kind: call.under_way.inbox.pop((name, g, kind), []) for kind in signature.x}
    if name not in call.programs.local:
        return {}, {}
    host = call.arrays[g].fields
    fields = {n: place(host[n], a.sharding) for n, a in signature.fields.items()}
    x = {
        kind: call.programs.add(name, parts, struct)
        if parts
        else jax.tree.map(call.state.zero, struct)
        for (kind, struct), parts in zip(signature.x.items(), arrived.values(), strict=True)
    }
    return x, fields


def _fed_links(call: StepCall, name: str, g: int) -> list[tuple[Link, int]]:
    """(link, group that it takes a group's output to) of a segment."""
    every: list[tuple[Link, int]] = []
    for link in call.programs.out_of[name]:
        if link.edge is None:
            every.append((link, g))
        else:
            to = link.edge.target
            every += [(link, f) for f in call.groups[g].feeds if call.groups[f].module == to]
    return every


def collect(call: StepCall, name: str, g: int) -> None:
    """Send the packer's places of a group's outputs to the segment that its forward task will
    ask for them; nothing that is under way already."""
    for link, fed in _fed_links(call, name, g):
        key = (name, link.target, g, fed)
        if link.edge is None or key in call.under_way.places:
            continue
        exchange = call.programs.exchange(link, call.groups[g].shape, call.groups[fed].shape)
        arrays, structs = call.arrays[fed], exchange.source_structs
        call.under_way.places[key] = [
            exchange.collect_sources(
                [place(host, s.sharding) for host, s in zip(one, structs, strict=True)]
            )
            for one in exchange.routes.route(arrays.places[g], arrays.max_asked.get(g))
        ]


def _forward(call: StepCall, name: str, g: int) -> Outputs:
    programs, group = call.programs, call.groups[g]
    x, fields = _inputs(call, name, g)
    kind = forward_kind(programs, name, evaluate=call.evaluate)
    y = programs.of_segment(name, group, kind)(call.state.program_params(name), x, fields)
    residuals = y.pop("residuals", {})
    if name in programs.backward and not call.evaluate:
        call.under_way.for_backward[name, g] = (x, fields, residuals)
    _add_sums(call, name, y.pop("sums", None))
    collect(call, name, g)
    sent: list[Any] = []
    for link, fed in _fed_links(call, name, g):
        if link.edge is None:
            wanted = programs.signature(link.target, group.shape).x["hidden"]
            _deliver(call, link.target, fed, "hidden", _sent(y["next"], wanted))
            continue
        shapes = group.shape, call.groups[fed].shape
        features = y["taps"][link.edge.tap] if link.edge.tap else y["exit"]
        gather = programs.of_exchange(link, *shapes, backward=False)
        for one in call.under_way.places[name, link.target, g, fed]:
            blocks = gather(features, one)
            arrived = programs.exchange(link, *shapes).deliver(blocks)
            _deliver(call, link.target, fed, link.edge.name, arrived)
            sent.append(blocks)
    return Outputs((), y, sent)


def _sent(hidden: Tree, wanted: Tree) -> Tree:
    return jax.tree.map(lambda a, struct: send(a, struct.sharding), hidden, wanted)


def _deliver(call: StepCall, name: str, g: int, kind: str, arrays: Tree) -> None:
    call.under_way.inbox.setdefault((name, g, kind), []).append(arrays)


def _backward(call: StepCall, name: str, g: int) -> Outputs:
    state = call.state
    inputs = call.under_way.for_backward.pop((name, g), None)
    x, fields, residuals = (*_inputs(call, name, g), {}) if inputs is None else inputs
    program = call.programs.of_segment(name, call.groups[g], BACKWARD)
    dy, received = _gradient_of_output(call, name, g)
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
    _add_sums(call, name, sums)
    for link in call.programs.into[name]:
        if link.source in call.programs.backward:
            _send_gradient(call, link, g, dx)
    return Outputs(received, done, ())


def _add_sums(call: StepCall, name: str, sums: Tree) -> None:
    module = call.programs.segments[name].plan.module
    if sums:
        call.under_way.sums.append({f"{module}.{k}": v for k, v in sums.items()})


def _gradient_of_output(call: StepCall, name: str, g: int) -> tuple[Tree, list[jax.Array]]:
    """Cotangents of what the segment gives, zeros where this group's output is not read; and
    what to wait for until exchanges have brought them."""
    programs, shape = call.programs, call.groups[g].shape
    dy: Tree = {}
    arrived: list[jax.Array] = []
    if name in call.scales:
        dy["sums"] = call.scales[name]
    by_output: dict[str, list[jax.Array]] = {}
    for link, fed in _fed_links(call, name, g):
        received = call.under_way.returned.pop((link, g, fed))
        if link.edge is None:
            dy["next"] = received
            continue
        scatter = programs.of_exchange(link, shape, call.groups[fed].shape, backward=True)
        for one in call.under_way.places[name, link.target, g, fed]:
            part, done = scatter(received, one)
            by_output.setdefault(link.edge.tap, []).append(part)
            arrived.append(done)
    for key in [k for k in call.under_way.places if k[0] == name and k[2] == g]:
        del call.under_way.places[key]
    structs = programs.signature(name, shape).y
    for kind, struct in structs.get("taps", {}).items():
        dy.setdefault("taps", {})[kind] = _total(call, name, by_output.get(kind), struct)
    if "exit" in structs:
        dy["exit"] = _total(call, name, by_output.get(""), structs["exit"])
    return dy, arrived


def _total(
    call: StepCall, name: str, parts: list[jax.Array] | None, struct: jax.ShapeDtypeStruct
) -> jax.Array:
    return call.programs.add(name, parts, struct) if parts else call.state.zero(struct)


def _send_gradient(call: StepCall, link: Link, g: int, dx: Tree) -> None:
    """The gradient of what a link brought, to all groups that it came from."""
    programs, shape = call.programs, call.groups[g].shape
    if link.edge is None:
        wanted = programs.signature(link.source, shape).y["next"]
        call.under_way.returned[link, g, g] = _sent(dx["hidden"], wanted)
        return
    for source in call.fed_by.get((g, link.edge.source), []):
        exchange = programs.exchange(link, call.groups[source].shape, shape)
        call.under_way.returned[link, source, g] = exchange.collect(dx[link.edge.name])

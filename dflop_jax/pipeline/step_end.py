"""The end of a step: a segment's gradients are reduced over its ranks, then its parameters are
updated."""

from __future__ import annotations

from typing import Any

import jax

from dflop_jax.pipeline.communicator import place, send
from dflop_jax.pipeline.state import share_tied
from dflop_jax.pipeline.step_call import StepCall
from dflop_jax.records import REDUCE, UPDATE

Tree = Any


def reduce_gradients(call: StepCall, name: str) -> Tree:
    """Reduce a segment's gradients; returns what to wait for."""
    programs, state = call.programs, call.state
    more: Tree = {}
    reader = programs.reader_of.get(name)
    if reader is not None and programs.updates[name].adds_shared:
        wanted = programs.updates[name].shard_structs()["entry"]
        more = {
            "entry": jax.tree.map(
                lambda g, w: send(g, w.sharding),
                call.under_way.reduced[reader][0]["entry"],
                wanted,
            )
        }
    program = programs.of_update(name, REDUCE)
    grads, squares, state.grads[name] = program(state.grads[name], more)
    call.under_way.reduced[name] = (grads, squares)
    return squares


def update_parameters(call: StepCall, name: str) -> Tree:
    """Update a segment's parameters; returns what to wait for."""
    state, segment, update = call.state, call.programs.segments[name], call.programs.updates[name]
    here = segment.sharding()
    squares = tuple(send(sq, here) for _, sq in call.under_way.reduced.values())
    params = state.params[name]
    updated = [p for p in segment.own_parts if p in segment.trainable]
    grads = {p: call.under_way.reduced[name][0][p] for p in updated}
    if updated:
        held = {p: params[p] for p in updated}, state.masters[name], state.opt_state[name]
        update_program = call.programs.of_update(name, UPDATE)
        limit = place(call.limit, here)
        new, *rest, total = update_program(*held, grads, squares, limit)
        state.masters[name], state.opt_state[name] = rest
        state.params[name] = {**params, **new}
        call.under_way.totals.append(total)
    # Not kept until the step is read, which is after the next one was dispatched.
    call.under_way.reduced[name] = ({}, call.under_way.reduced[name][1])
    if update.shared:
        share_tied(call.programs, state, name)
    return state.shared[name] if not updated else total

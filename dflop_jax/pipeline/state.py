"""What a run carries from step to step: parameters, optimizer state and gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from dflop_jax.pipeline.communicator import send, zeros
from dflop_jax.pipeline.held import program_structs
from dflop_jax.pipeline.programs import Programs

Tree = Any


@dataclass
class TrainState:
    """What a run carries from step to step, by segment name; steps donate and replace it.

    `masters` are {} for a segment whose programs hold the optimizer's own parameters.
    `shared` are the entry's parameters of a tied module, as the segment that reads them has them.
    """

    params: dict[str, Tree] = field(default_factory=dict)
    masters: dict[str, Tree] = field(default_factory=dict)
    opt_state: dict[str, Tree] = field(default_factory=dict)
    grads: dict[str, Tree] = field(default_factory=dict)
    shared: dict[str, Tree] = field(default_factory=dict)
    zeros: dict[jax.ShapeDtypeStruct, jax.Array] = field(default_factory=dict)

    def program_params(self, name: str) -> Tree:
        """What a segment's programs read."""
        shared = self.shared.get(name)
        return {**self.params[name], "entry": shared} if shared is not None else self.params[name]

    def zero(self, struct: jax.ShapeDtypeStruct) -> jax.Array:
        """Zeros that are never donated, kept."""
        if struct not in self.zeros:
            self.zeros[struct] = zeros(struct)
        return self.zeros[struct]


def share_tied(programs: Programs, state: TrainState, reader: str) -> None:
    """Send the entry's parameters of a tied module from their owner to the segment that reads
    them."""
    structs = program_structs(programs.segments[reader])["entry"]
    entry = state.params[programs.owner_of[reader]]["entry"]
    state.shared[reader] = jax.tree.map(
        lambda a, s: send(a, s.sharding, donated=True), entry, structs
    )

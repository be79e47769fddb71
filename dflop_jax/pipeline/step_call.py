"""One step of a run: what it runs, and what of it is under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dflop_jax.pipeline.communicator import place
from dflop_jax.pipeline.programs import GroupArrays, Programs
from dflop_jax.pipeline.state import TrainState
from dflop_jax.records import Group
from dflop_jax.tasks.graph import Link, fed_by

Tree = Any


@dataclass(eq=False)
class UnderWay:
    """Arrays of a step between its tasks.

    Attributes:
      inbox: (segment, group, input) -> parts that have arrived.
      returned: (link, source group, reading group) -> the gradient that came back.
      for_backward: (segment, group) -> inputs and residuals kept for backward.
      places: (segment, reading segment, group, reading group) -> the packer's places there, by
        round.
      reduced: by segment, reduced gradients and the sum of their squares.
      sums: of losses, by name.
      totals: sums of squares of all segments, one a trained segment.
    """

    inbox: dict[tuple[str, int, str], list[Tree]] = field(default_factory=dict)
    returned: dict[tuple[Link, int, int], Tree] = field(default_factory=dict)
    for_backward: dict[tuple[str, int], tuple[Tree, Tree, Tree]] = field(default_factory=dict)
    places: dict[tuple[str, str, int, int], list[Tree]] = field(default_factory=dict)
    reduced: dict[str, tuple[Tree, jax.Array]] = field(default_factory=dict)
    sums: list[dict[str, jax.Array]] = field(default_factory=list)
    totals: list[jax.Array] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class StepCall:
    """One step: the groups that it runs and on what.

    Attributes:
      scales: by segment with a loss, what that is multiplied by.
      limit: of the sum of squares of all gradients, above which parameters stay as they are.
      fed_by: (group, module) -> the groups of the module that feed it.
    """

    programs: Programs
    state: TrainState
    groups: Sequence[Group]
    arrays: Sequence[GroupArrays]
    evaluate: bool
    scales: Mapping[str, jax.Array]
    limit: np.ndarray
    fed_by: Mapping[tuple[int, str], Sequence[int]]
    under_way: UnderWay = field(default_factory=UnderWay)


def step_call(
    programs: Programs,
    state: TrainState,
    groups: Sequence[Group],
    arrays: Sequence[GroupArrays],
    scales: Mapping[str, float],
    *,
    norm_limit: float = math.inf,
    evaluate: bool = False,
) -> StepCall:
    """A step before its first task. `scales` multiply the losses of modules; a module without one
    has none. Parameters stay as they are where the global gradient norm is above `norm_limit` or
    not finite."""
    assert len(groups) == len(arrays), (len(groups), len(arrays))
    by_segment = {
        n: place(np.asarray(scales.get(s.plan.module, 0.0), np.float32), s.sharding())
        for n, s in programs.segments.items()
        if s.has_loss
    }
    limit = np.asarray(min(norm_limit**2, np.finfo(np.float32).max), np.float32)
    return StepCall(programs, state, groups, arrays, evaluate, by_segment, limit, fed_by(groups))


def settle(call: StepCall) -> None:
    """Wait until everything in flight is there."""
    way = call.under_way
    flying = (way.inbox, way.returned, way.for_backward, way.places)
    jax.block_until_ready([[*by_key.values()] for by_key in flying])
    jax.block_until_ready((call.state.grads, call.state.shared))

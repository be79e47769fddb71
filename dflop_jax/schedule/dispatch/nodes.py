"""Which device takes what was dealt to a data rank, so that least crosses nodes.

After balancing, ranks are alike but for what they hold: renaming them changes no load (OrchMLLM,
arXiv 2503.23830, node-wise all-to-all). The best names are an assignment problem, solved exactly
for one module given where the others are; modules take turns until nothing moves less. Of names
under which as much crosses nodes, those are taken under which least moves inside them.

Shape suffixes: R ranks of the module that is renamed, Q ranks of another, P places for the former.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np

from dflop_jax.records import Edge, Plan, homes
from dflop_jax.schedule.dispatch.traffic import read_between
from dflop_jax.schedule.groups import BucketRun, PackingSpace
from dflop_jax.schedule.placing import moved_to
from dflop_jax.schedule.solver.problem import ROUNDING, Floats, Ints

_FEW_RANKS = 4  # whose 24 orders are tried in microseconds; twice as many have 40,320
_MAX_PASSES = 4  # over all modules, each an assignment; it ends before when nothing moves less


@dataclass(frozen=True, eq=False)
class Devices:
    """The device of each rank; every `node` of them, counted from 0, are a node."""

    of_rank: Ints
    node: int


def staying(moved_RQ: Ints, here: Devices, there: Devices) -> Floats:
    """[R, P]: what would not cross nodes, and second what would not move at all, if what rank R
    holds lay at place P; `moved_RQ` is between it and the ranks of another module."""
    total = float(moved_RQ.sum())
    in_node_RN = _grouped(moved_RQ, there.of_rank // there.node, here.of_rank // here.node)
    on_device_RP = _grouped(moved_RQ, there.of_rank, here.of_rank)
    return in_node_RN * (total + 1) + on_device_RP


def _grouped(moved_RQ: Ints, label_Q: Ints, wanted_P: Ints) -> Floats:
    """[R, P]: sums over the columns whose label is the one wanted."""
    labels = np.union1d(label_Q, wanted_P)
    rows, columns = np.nonzero(moved_RQ)  # few: a rank has to do with few others
    cells = rows * len(labels) + np.searchsorted(labels, label_Q)[columns]
    counted = np.bincount(cells, moved_RQ[rows, columns], len(moved_RQ) * len(labels))
    sums: Floats = counted.astype(np.float64, copy=False)
    return sums.reshape(-1, len(labels))[:, np.searchsorted(labels, wanted_P)]


def best_names(staying_RP: Floats) -> Ints:
    """[P]: the rank whose content goes to each place so that most stays; as they are where that
    is no worse."""
    same = np.arange(len(staying_RP))
    names = _assignment(staying_RP)
    if staying_RP[names, same].sum() <= staying_RP[same, same].sum() * (1 + ROUNDING):
        return same
    return names


def _assignment(staying_RP: Floats) -> Ints:
    """[P]: the rank of each place, each once, so that most stays."""
    n = len(staying_RP)
    if n <= _FEW_RANKS:
        every = _orders(n)
        best: Ints = every[np.argmax(staying_RP[every, np.arange(n)].sum(1))]
        return best
    from scipy.optimize import linear_sum_assignment  # takes half a second to load

    rank, place = linear_sum_assignment(staying_RP, maximize=True)
    names = np.empty(n, np.int64)
    names[place] = rank
    return names


@lru_cache
def _orders(n: int) -> Ints:
    """[n!, n]: every order of n ranks."""
    return np.array(list(permutations(range(n))), np.int64).reshape(-1, n)


def rename_ranks(room: PackingSpace, answer: Sequence[BucketRun], plan: Plan) -> None:
    """Move what ranks hold to other ranks, in place, so that least crosses nodes and then devices.

    Every microbatch has names of its own, but of a module whose programs cost something by their
    content: there ranks were matched over the step, and all microbatches have the same.
    """
    names = _Names(room, plan)
    for _ in range(_MAX_PASSES):
        changed = False
        for module in plan.layout.modules:
            if room.capacity.ranks[module] > 1:
                for together in names.alike(answer, module):
                    changed |= names.rename(module, together)
        if not changed:
            break


Place = tuple[BucketRun, int]  # a microbatch


@dataclass(frozen=True, eq=False)
class _Names:
    room: PackingSpace
    plan: Plan

    def alike(self, answer: Sequence[BucketRun], module: str) -> Iterator[list[Place]]:
        """Microbatches whose ranks have the same names."""
        size = self.room.capacity.group_size
        every = [(t, k) for t in answer if module in t.placed for k in range(size)]
        if module in self.room.priced:
            yield every
        else:
            yield from ([place] for place in every)

    def rename(self, module: str, together: Sequence[Place]) -> bool:
        """Give the ranks of a module the best names; whether any changed."""
        n = self.room.capacity.ranks[module]
        staying_RP = np.zeros((n, n))
        for edge in self.plan.layout.edges:
            if module in (edge.source, edge.target):
                moved = sum((self._moved(edge, *place) for place in together),
                            np.zeros(self._ranks(edge), np.int64))  # fmt: skip
                source, home = self._devices(edge)
                if module == edge.source:
                    staying_RP += staying(moved, source, home)
                else:
                    staying_RP += staying(moved.T, home, source)
        names = best_names(staying_RP)
        if (names == np.arange(n)).all():
            return False
        for t, k in together:
            ranks_KD = np.tile(np.arange(n), (self.room.capacity.group_size, 1))
            ranks_KD[k] = names
            t.placed[module] = moved_to(t.placed[module], ranks_KD)
        return True

    def _ranks(self, edge: Edge) -> tuple[int, int]:
        ranks = self.room.capacity.ranks
        return ranks[edge.source], ranks[edge.target]

    def _devices(self, edge: Edge) -> tuple[Devices, Devices]:
        """The devices of the source's ranks, and of the homes of the target's."""
        of_rank = np.array(self.plan.layout.devices(edge.source))
        node = self.plan.scheduling.node or self.plan.layout.n_devices
        return Devices(of_rank, node), Devices(of_rank[homes(*self._ranks(edge))], node)

    def _moved(self, edge: Edge, together: BucketRun, k: int) -> Ints:
        if edge.source not in together.placed or edge.target not in together.placed:
            return np.zeros(self._ranks(edge), np.int64)
        source, target = (
            places.chosen(places.microbatch == k)
            for places in (together.placed[edge.source], together.placed[edge.target])
        )
        modules = edge.source, edge.target
        return read_between(modules, source, target, self.room.batch, self._ranks(edge))

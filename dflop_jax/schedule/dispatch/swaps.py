"""Which of equal pieces lies on which rank: as many as can lie where they are read.

Pieces of one length are the same to a balance, so they may change places for nothing. Each goes to
the rank where its sample is read, while that has a place; then to a rank of the same node; the rest
goes round the ranks that are left, so that no two ranks exchange much more than others.

Shape suffixes: P pieces of one length, and as many places.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from dflop_jax.records import Plan, home_rank
from dflop_jax.schedule.groups import Room, Together
from dflop_jax.schedule.solver.problem import Ints


def bring_home(room: Room, answer: Sequence[Together], plan: Plan) -> None:
    """Let equal pieces of a module change places within a microbatch, in place, so that least goes
    to the ranks of the module that reads it; of several that read it the first."""
    batch, ranks = room.batch, room.capacity.ranks
    for edge in {e.source: e for e in reversed(plan.layout.edges)}.values():
        low, high = ranks[edge.source], ranks[edge.target]
        if low == 1:
            continue
        node_of = np.array(plan.layout.devices(edge.source)) // (
            plan.scheduling.node or plan.layout.n_devices
        )
        homes = np.array([home_rank(rank, low, high) for rank in range(high)])
        sample_of = {
            m: np.repeat(np.arange(batch.n), batch.count[m]) for m in (edge.source, edge.target)
        }
        for t in answer:
            shapes = (room.buckets[t.bucket].shape(m) for m in (edge.source, edge.target))
            here, there = (s.rows if s else 1 for s in shapes)
            both = zip(t.placed.get(edge.source, ()), t.placed.get(edge.target, ()))
            for source, target in both:
                read_at_N = np.full(batch.n, -1)
                samples = sample_of[edge.target][target.pieces]
                read_at_N[samples[::-1]] = homes[target.rows_P[::-1] // there]
                home_P = read_at_N[sample_of[edge.source][source.pieces]]
                length_P = batch.lengths[edge.source][source.pieces]
                for length in np.unique(length_P):
                    equal = np.flatnonzero(length_P == length)
                    rows = source.rows_P[equal]
                    places = nearest_places(rows // here, home_P[equal], node_of)
                    source.rows_P[equal] = rows[places]


def nearest_places(rank_P: Ints, home_P: Ints, node_of: Ints) -> Ints:
    """[P]: the place that each piece takes, most on their ranks, then in their nodes. Place p is on
    rank `rank_P[p]`, piece p is read on rank `home_P[p]` (-1: nowhere)."""
    taken = np.full(len(rank_P), -1)
    order = _round_the_ranks(rank_P)
    left = list(range(len(home_P)))
    for label in (np.arange(len(node_of)), node_of, np.zeros_like(node_of)):
        free: dict[int, deque[int]] = defaultdict(deque)
        used = set(taken.tolist())
        for place in order.tolist():
            if place not in used:
                free[int(label[rank_P[place]])].append(place)
        waiting = []
        for piece in left:
            key = int(label[home_P[piece]]) if home_P[piece] >= 0 else -1
            if free[key]:
                taken[piece] = free[key].popleft()
            else:
                waiting.append(piece)
        left = waiting
    rest = [p for places in free.values() for p in places]
    taken[left] = rest  # of pieces that nobody reads
    return taken


def _round_the_ranks(rank_P: Ints) -> Ints:
    """Places in an order that takes one of each rank in turn."""
    by_rank = np.argsort(rank_P, kind="stable")
    ordered = rank_P[by_rank]
    turn = np.arange(len(rank_P)) - np.searchsorted(ordered, ordered)
    return by_rank[np.argsort(turn, kind="stable")]

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

from dflop_jax.records import Plan, homes, rank_nodes
from dflop_jax.schedule.groups import BucketRun, PackingSpace
from dflop_jax.schedule.solver.problem import Ints


def bring_home(room: PackingSpace, answer: Sequence[BucketRun], plan: Plan) -> None:
    """Let equal pieces of a module change places within a microbatch, in place, so that least goes
    to the ranks of the module that reads it; of several that read it the first."""
    batch, ranks = room.batch, room.capacity.ranks
    for edge in {e.source: e for e in reversed(plan.layout.edges)}.values():
        low, high = ranks[edge.source], ranks[edge.target]
        if low == 1:
            continue
        node_of, home_D = rank_nodes(plan, edge.source), homes(low, high)
        for t in (t for t in answer if edge.source in t.placed and edge.target in t.placed):
            source, target = t.placed[edge.source], t.placed[edge.target]
            read_at_N = np.full(batch.n, -1)
            samples = batch.sample[edge.target][target.piece]
            read_at_N[samples[::-1]] = home_D[target.rank[::-1]]
            home_P = read_at_N[batch.sample[edge.source][source.piece]]
            length_P = batch.lengths[edge.source][source.piece]
            kinds = source.microbatch * (length_P.max(initial=0) + 1) + length_P
            _, kind_P = np.unique(kinds, return_inverse=True)
            rank, row = source.rank.copy(), source.row.copy()
            for kind in range(kind_P.max(initial=-1) + 1):
                equal = np.flatnonzero(kind_P == kind)
                places = equal[nearest_places(rank[equal], home_P[equal], node_of)]
                rank[equal], row[equal] = rank[places], row[places]
            t.placed[edge.source] = source.moved(rank, row)


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

"""What moves between the data ranks of two modules, from loads alone, and which device takes what
was dealt to a data rank, so that least crosses nodes. Amounts are tokens of the source, to which
its features are proportional.

After balancing, ranks are alike but for what they hold: renaming them changes no load (OrchMLLM,
arXiv 2503.23830, node-wise all-to-all). The best names are an assignment problem, solved exactly
for one module given where the others are; modules take turns until nothing moves less. Of names
under which as much crosses nodes, those are taken under which least moves inside them. Then equal
pieces change places.

Shape suffixes: R ranks of the module that is renamed, Q ranks of another, P places for the former.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.records import (
    ExchangeRoom,
    Layout,
    Load,
    PiecePlaces,
    Plan,
    Schedule,
    Shape,
    crossing,
    homes,
    rank_nodes,
    traffic,
)
from dflop_jax.schedule.balance_problem import ROUNDING, Floats, Ints
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.content_balance import moved_to
from dflop_jax.schedule.groups import BucketRun, PackingSpace

_MAX_PASSES = 4  # over all modules, each an assignment; it ends before when nothing moves less
# Shares of a rank's features. The least room of a round, whatever the batches that were seen move:
# twice as much sends more padding, and fewer groups of later batches need a second round. And what
# a round costs beside its room: twice as much gives larger rooms and fewer rounds.
_LEAST_ROOM, _ROUND_COST = 1 / 32, 0.3


@dataclass(frozen=True, eq=False)
class Devices:
    """The device of each rank; every `node` of them, counted from 0, are a node."""

    of_rank: Ints
    node: int


def staying(moved_RQ: Ints, here: Devices, there: Devices) -> Floats:
    """[R, P]: what would not cross nodes, and second what would not move at all, if what rank R
    holds lay at place P; `moved_RQ` is between it and the ranks of another module."""
    total = float(moved_RQ.sum())
    in_node_RP = _summed(moved_RQ, there.of_rank // there.node, here.of_rank // here.node)
    return in_node_RP * (total + 1) + _summed(moved_RQ, there.of_rank, here.of_rank)


def _summed(moved_RQ: Ints, label_Q: Ints, wanted_P: Ints) -> Floats:
    """[R, P]: sums over the columns whose label is the one wanted."""
    sums_LR = np.zeros((max(label_Q.max(), wanted_P.max()) + 1, len(moved_RQ)))
    np.add.at(sums_LR, label_Q, moved_RQ.T)
    return sums_LR[wanted_P].T


def best_names(staying_RP: Floats) -> Ints:
    """[P]: the rank whose content goes to each place so that most stays; as they are where that
    is no worse."""
    from scipy.optimize import linear_sum_assignment  # takes half a second to load

    names, same = linear_sum_assignment(staying_RP.T, maximize=True)[::-1]
    gains = staying_RP[names, same].sum() > staying_RP[same, same].sum() * (1 + ROUNDING)
    return names if gains else same


def rename_ranks(room: PackingSpace, answer: Sequence[BucketRun], plan: Plan) -> None:
    """Move what ranks hold to other ranks, in place, so that least crosses nodes and then devices.

    Every microbatch has names of its own, but of a module whose programs cost something by their
    content: there ranks were matched over the step, and all microbatches have the same.
    """
    for _ in range(_MAX_PASSES):
        changed = False
        for module in plan.layout.modules:
            if room.capacity.ranks[module] > 1:
                size = room.capacity.group_size
                every = [(t, k) for t in answer if module in t.placed for k in range(size)]
                for places in [every] if module in room.priced else [[place] for place in every]:
                    changed |= _rename(room, plan, module, places)
        if not changed:
            break


def _rename(
    room: PackingSpace, plan: Plan, module: str, places: Sequence[tuple[BucketRun, int]]
) -> bool:
    """Give a module's ranks the best names, the same in all these microbatches; whether any
    changed."""
    ranks, layout = room.capacity.ranks, plan.layout
    node, n = plan.scheduling.node or layout.n_devices, ranks[module]
    staying_RP = np.zeros((n, n))
    for edge in layout.edges:
        if module not in (edge.source, edge.target):
            continue
        both = edge.source, edge.target
        n_VD = ranks[edge.source], ranks[edge.target]
        moved_VD = np.zeros(n_VD, np.int64)
        for t, k in places:
            if edge.source in t.placed and edge.target in t.placed:
                source, target = (t.placed[m].chosen(t.placed[m].microbatch == k) for m in both)
                moved_VD += read_between(both, source, target, room.batch, n_VD)
        of_rank = np.array(layout.devices(edge.source))
        here, home = Devices(of_rank, node), Devices(of_rank[homes(*n_VD)], node)
        if module == edge.source:
            staying_RP += staying(moved_VD, here, home)
        else:
            staying_RP += staying(moved_VD.T, home, here)
    names = best_names(staying_RP)
    if (names == np.arange(n)).all():
        return False
    for t, k in places:
        ranks_KD = np.tile(np.arange(n), (room.capacity.group_size, 1))
        ranks_KD[k] = names
        t.placed[module] = moved_to(t.placed[module], ranks_KD)
    return True


def bring_home(room: PackingSpace, answer: Sequence[BucketRun], plan: Plan) -> None:
    """Let equal pieces of a module change places within a microbatch, in place, so that least goes
    to the ranks of the module that reads it; of several that read it the first.

    Pieces of one length are the same to a balance, so they may change places for nothing. Each goes
    to the rank where its sample is read, while that has a place; then to a rank of the same node;
    the rest goes round the ranks that are left, so that no two ranks exchange much more than
    others.
    """
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
    """[P]: the place that each of P pieces of one length takes, most on their ranks, then in their
    nodes. Place p is on rank `rank_P[p]`, piece p is read on rank `home_P[p]` (-1: nowhere)."""
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


def read_between(
    modules: tuple[str, str],
    source: PiecePlaces,
    target: PiecePlaces,
    batch: Batch,
    n: tuple[int, int],
) -> Ints:
    """[V, D]: what each of the `n` = (V, D) ranks of two modules has for each that reads it."""
    here, there = (batch.sample[m][p.piece] for m, p in zip(modules, (source, target)))
    amount = batch.lengths[modules[0]][source.piece]
    return traffic(here, source.rank, amount, there, target.rank, n)


def exchange_rooms(
    layout: Layout, schedules: Sequence[Schedule], batches: Sequence[Sequence[Load]]
) -> tuple[ExchangeRoom, ...]:
    """Rooms with which the exchanges of these schedules send least: one round takes what most
    groups move, and a few need another."""
    shares: dict[tuple[str, str, Shape, Shape], list[float]] = {}
    for schedule, loads in zip(schedules, batches, strict=True):
        batch = Batch(loads, layout.modules)
        for place, target in enumerate(schedule.groups):
            for source in (g for g in schedule.groups if place in g.feeds):
                n = layout.data_ranks(source.module), layout.data_ranks(target.module)
                if n[0] > 1:
                    both = source.module, target.module
                    read = read_between(both, source.pieces, target.pieces, batch, n)
                    moved = crossing(read, np.zeros(n[0], np.int64))
                    held_tokens = source.microbatches * source.shape.size
                    key = *both, source.shape, target.shape
                    shares.setdefault(key, []).append(moved.most / held_tokens)
    return tuple(ExchangeRoom(*key, _best_share(np.array(needs))) for key, needs in shares.items())


def _best_share(needs: np.ndarray) -> float:
    """The share, of those that groups need, under which all their rounds together take least."""
    rooms = np.unique(np.clip(needs, _LEAST_ROOM, 1.0))
    rounds = np.maximum(1, np.ceil(needs[:, None] / rooms - 1e-9))
    return float(rooms[np.argmin((rounds * (rooms + _ROUND_COST)).sum(axis=0))])

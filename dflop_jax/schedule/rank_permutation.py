"""Permute the data ranks of modules so that fewer tokens cross nodes, and size the buffers of
exchanges. Traffic between modules is counted in tokens of the source, to which features are
proportional.

Data ranks of a module have equal devices, so permuting their contents changes no load (OrchMLLM,
arXiv 2503.23830, node-wise all-to-all). With all other modules fixed, the best permutation of one
module is an assignment problem, solved exactly: first for traffic between nodes, then for traffic
within nodes. Modules take turns until no traffic is saved. Finally pieces of equal length are
swapped.

Shape suffixes: R ranks of the permuted module, Q ranks of another module, P positions of ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from dflop_jax.records import (
    ExchangeCapacity,
    Layout,
    Load,
    PackedPieces,
    Plan,
    Schedule,
    Shape,
    crossing_traffic,
    home_ranks,
    rank_nodes,
    rank_traffic,
)
from dflop_jax.schedule.balance_problem import ROUNDING, Floats, Ints
from dflop_jax.schedule.batch import Batch, capacity_of
from dflop_jax.schedule.content_balance import apply_permutation
from dflop_jax.schedule.groups import Assignment, BucketRun, PackingSpace

_MAX_PASSES = 4  # maximum passes over all modules; the last pass changes nothing if fewer suffice
# Shares of a rank's features: the smallest buffer of a round (larger: more padding is sent, fewer
# groups need a second round), and the fixed cost of a round (larger: larger buffers, fewer rounds).
_MIN_SHARE, _ROUND_OVERHEAD = 1 / 32, 0.3


def local_tokens(tokens_RQ: Ints, device_P: Ints, device_Q: Ints, node: int) -> Floats:
    """Return the weight, [R, P], of tokens that stay local if rank R moves to position P: first on
    their node, second on their device. `tokens_RQ` is the traffic with the ranks of another module;
    `node` consecutive devices, counted from 0, form a node."""
    is_same_node_QP = np.equal.outer(device_Q // node, device_P // node)
    weight_QP = is_same_node_QP * (tokens_RQ.sum() + 1.0) + np.equal.outer(device_Q, device_P)
    return tokens_RQ @ weight_QP


def best_permutation(local_RP: Floats) -> Ints:
    """Return the rank that moves to each position, [P], so that most tokens stay local; the
    identity if no other permutation is better."""
    from scipy.optimize import linear_sum_assignment  # takes half a second to load

    ranks_P, identity = linear_sum_assignment(local_RP.T, maximize=True)[::-1]
    least_gain = local_RP[identity, identity].sum() * (1 + ROUNDING)
    improves = local_RP[ranks_P, identity].sum() > least_gain
    return ranks_P if improves else identity


def permute_ranks(space: PackingSpace, assignment: Assignment, plan: Plan) -> None:
    """Permute the ranks of every module, in place, to minimise traffic between nodes, then between
    devices: in each microbatch separately, or in all alike if ranks were matched over the step."""
    capacity = space.batch.capacity
    for _ in range(_MAX_PASSES):
        changed = False
        for module in (m for m in plan.layout.modules if capacity.ranks[m] > 1):
            runs = [t for t in assignment if module in t.placements]
            each = [(t, k) for t in runs for k in range(capacity.group_size)]
            for members in [each] if module in space.priced else [[member] for member in each]:
                changed |= _permute_module(space, plan, module, members)
        if not changed:
            break


def _permute_module(
    space: PackingSpace, plan: Plan, module: str, members: Sequence[tuple[BucketRun, int]]
) -> bool:
    """Apply a module's best permutation to all these microbatches; return whether it changed."""
    ranks, layout = space.batch.capacity.ranks, plan.layout
    node, n = plan.scheduling.node or layout.n_devices, ranks[module]
    local_RP = np.zeros((n, n))
    for edge in layout.edges:
        modules, n_VD = (edge.source, edge.target), (ranks[edge.source], ranks[edge.target])
        if module not in modules:
            continue
        tokens_VD = np.zeros(n_VD, np.int64)
        for t, k in members:
            if set(modules) <= t.placements.keys():
                places = (t.placements[m] for m in modules)
                source, target = (p.select(p.microbatch == k) for p in places)
                tokens_VD += tokens_read(modules, source, target, space.batch)
        device_V = np.array(layout.devices(edge.source))
        home_D = device_V[home_ranks(*n_VD)]
        if module == edge.source:
            local_RP += local_tokens(tokens_VD, device_V, home_D, node)
        else:
            local_RP += local_tokens(tokens_VD.T, home_D, device_V, node)
    ranks_P = best_permutation(local_RP)
    if (ranks_P == np.arange(n)).all():
        return False
    for t, k in members:
        ranks_KD = np.tile(np.arange(n), (space.batch.capacity.group_size, 1))
        ranks_KD[k] = ranks_P
        t.placements[module] = apply_permutation(t.placements[module], ranks_KD)
    return True


def swap_equal_pieces(space: PackingSpace, assignment: Assignment, plan: Plan) -> None:
    """Swap pieces of equal length within microbatches, in place, so that each lies on the rank
    where its sample is first read if that rank has a slot, else on the same node. The rest goes to
    the remaining ranks in turn, so that traffic between pairs of ranks is even."""
    batch, ranks = space.batch, space.batch.capacity.ranks
    for edge in {e.source: e for e in reversed(plan.layout.edges)}.values():
        source_ranks, target_ranks = ranks[edge.source], ranks[edge.target]
        if source_ranks == 1:
            continue
        node_of, home_D = rank_nodes(plan, edge.source), home_ranks(source_ranks, target_ranks)
        joined = {edge.source, edge.target}
        for t in (t for t in assignment if joined <= t.placements.keys()):
            source, target = t.placements[edge.source], t.placements[edge.target]
            read_at_N = np.full(batch.n_samples, -1)
            samples = batch.sample[edge.target][target.piece_id]
            read_at_N[samples[::-1]] = home_D[target.rank[::-1]]
            home_P = read_at_N[batch.sample[edge.source][source.piece_id]]
            length_P = batch.lengths[edge.source][source.piece_id]
            kinds = source.microbatch * (length_P.max(initial=0) + 1) + length_P
            _, kind_P = np.unique(kinds, return_inverse=True)
            rank, row = source.rank.copy(), source.row.copy()
            for kind in range(kind_P.max(initial=-1) + 1):
                equal = np.flatnonzero(kind_P == kind)
                slots = equal[nearest_slots(rank[equal], home_P[equal], node_of)]
                rank[equal], row[equal] = rank[slots], row[slots]
            t.placements[edge.source] = source.reassigned(rank, row)


def nearest_slots(rank_P: Ints, home_P: Ints, node_of: Ints) -> Ints:
    """Return a slot for each of P pieces of equal length, [P]: first on the rank where the piece is
    read, then on the same node. Slot p is on rank `rank_P[p]`; piece p is read on rank `home_P[p]`
    (-1: nowhere)."""
    slot_P = np.full(len(rank_P), -1)
    by_rank = np.argsort(rank_P, kind="stable")
    turn_P = np.arange(len(rank_P)) - np.searchsorted(rank_P[by_rank], rank_P[by_rank])
    order = by_rank[np.argsort(turn_P, kind="stable")]  # one slot of each rank in turn
    unassigned = list(range(len(home_P)))
    for label in (np.arange(len(node_of)), node_of, np.zeros_like(node_of)):
        free: dict[int, deque[int]] = defaultdict(deque)
        used = set(slot_P.tolist())
        for slot in order.tolist():
            if slot not in used:
                free[int(label[rank_P[slot]])].append(slot)
        still_unassigned = []
        for piece_index in unassigned:
            key = int(label[home_P[piece_index]]) if home_P[piece_index] >= 0 else -1
            if free[key]:
                slot_P[piece_index] = free[key].popleft()
            else:
                still_unassigned.append(piece_index)
        unassigned = still_unassigned
    rest = [p for places in free.values() for p in places]
    slot_P[unassigned] = rest  # pieces that no rank reads
    return slot_P


def tokens_read(
    modules: tuple[str, str], source: PackedPieces, target: PackedPieces, batch: Batch
) -> Ints:
    """Return the tokens [V, D] that each source rank holds for each target rank."""
    n = batch.capacity.ranks[modules[0]], batch.capacity.ranks[modules[1]]
    amount = batch.lengths[modules[0]][source.piece_id]
    sent, read = (batch.sample[m][p.piece_id] for m, p in zip(modules, (source, target)))
    return rank_traffic(sent, source.rank, amount, read, target.rank, n)


def exchange_capacities(
    layout: Layout, schedules: Sequence[Schedule], batches: Sequence[Sequence[Load]]
) -> tuple[ExchangeCapacity, ...]:
    """Return the exchange buffer sizes with the lowest cost over these schedules."""
    shares: dict[tuple[str, str, Shape, Shape], list[float]] = {}
    for schedule, loads in zip(schedules, batches, strict=True):
        batch = Batch(loads, capacity_of(layout))
        for source in schedule.groups:
            n = layout.data_ranks(source.module)
            for target in (schedule.groups[f] for f in source.feeds if n > 1):
                modules = source.module, target.module
                read = tokens_read(modules, source.pieces, target.pieces, batch)
                traffic = crossing_traffic(read, np.zeros(n, np.int64))
                held_tokens = source.microbatches * source.shape.size
                key = *modules, source.shape, target.shape
                shares.setdefault(key, []).append(traffic.max_amount / held_tokens)
    return tuple(
        ExchangeCapacity(*key, _cheapest_share(np.array(needs))) for key, needs in shares.items()
    )


def _cheapest_share(needs: np.ndarray) -> float:
    """Return the share in `needs` with the lowest total cost over all rounds as a buffer."""
    rooms = np.unique(np.clip(needs, _MIN_SHARE, 1.0))
    rounds = np.maximum(1, np.ceil(needs[:, None] / rooms - 1e-9))
    return float(rooms[np.argmin((rounds * (rooms + _ROUND_OVERHEAD)).sum(axis=0))])

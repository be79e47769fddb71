"""Fill groups one after another, each with the largest samples that still fit, in random orders of
samples and random mixes of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from operator import le, sub

import numpy as np

from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.groups import Assignment, BucketRun, PackingSpace
from dflop_jax.schedule.packing import Packing

# Largest relative noise on the sizes by which samples are sorted; with 0, buckets alone differ.
_MAX_NOISE = 0.6
_STEPS_PER_WORK = 500  # comparisons of a sample with a row per unit of work
_MIN_TRIES = 4  # a smaller budget is not spent, since the first tries seldom find anything

Sizes = list[list[float]]  # of each sample: tokens in the anchor (0 without one) and shared modules


def fill_randomly(
    space: PackingSpace, n_main: int, known: Assignment, budget: Budget, rng: np.random.Generator
) -> list[BucketRun]:
    """Return the cheapest assignment that is found with the first `n_main` buckets, or `known` if
    none is cheaper."""
    batch, best, best_cost = space.batch, list(known), space.cost(known)
    n_rows = sum(len(microbatch) for run in known for microbatch in run.microbatches)
    # A try compares half of the samples with a row in the mean.
    if budget.remaining < _MIN_TRIES * batch.n_samples * n_rows / 2 / _STEPS_PER_WORK:
        return best
    anchor_N = batch.tokens[batch.anchor] if batch.anchor else np.zeros(batch.n_samples)
    sizes_NR = np.column_stack([anchor_N, batch.shared_tokens_NM]).astype(float)
    relative_NR = sizes_NR / np.maximum(sizes_NR.sum(axis=0), 1.0)
    while batch.n_samples and not budget.is_spent:
        budget.spend(1)
        weight_R = rng.uniform(size=sizes_NR.shape[1])
        noise_N = rng.uniform(1, 1 + rng.uniform(0, _MAX_NOISE), batch.n_samples)
        order = np.argsort(-(relative_NR @ weight_R) * noise_N, kind="stable").tolist()
        two_buckets = rng.integers(0, n_main, 2)
        turns = two_buckets[(rng.uniform(size=batch.n_samples) < rng.uniform()).astype(int)]
        groups = _fill_groups(space, sizes_NR.tolist(), order, turns.tolist(), budget)
        counts_C = np.bincount([b for b, _ in groups], minlength=len(space.buckets))
        cost = int(space.ticks.step_ticks(counts_C[None])[0])
        if cost < best_cost:
            runs = [space.build_run(b, microbatches, budget) for b, microbatches in groups]
            if all(runs):  # pieces fit the rows, too
                best, best_cost = [run for run in runs if run], cost
    return best


def _fill_groups(
    space: PackingSpace, sizes: Sizes, waiting: list[int], turns: Sequence[int], budget: Budget
) -> list[tuple[int, Packing]]:
    """Return the bucket and microbatches of the groups that hold all samples. Buckets take turns,
    but each must hold the largest sample; the last is the cheapest that holds the rest."""
    groups: list[tuple[int, Packing]] = []
    able_CN = space.can_hold_CN
    while waiting:
        b = turns[len(groups)]
        if not able_CN[b, waiting[0]]:
            b = int(able_CN[:, waiting[0]].argmax())
        packed, rest = _fill_group(space, b, sizes, waiting, budget)
        assert len(rest) < len(waiting), "an empty group holds the first sample"
        for cheaper in space.buckets_by_cost if not rest else ():
            if cheaper == b:
                break
            smaller, left = _fill_group(space, cheaper, sizes, waiting, budget)
            if not left:
                b, packed = cheaper, smaller
                break
        groups.append((b, packed))
        waiting = rest
    return groups


def _fill_group(
    space: PackingSpace, b: int, sizes: Sizes, waiting: list[int], budget: Budget
) -> tuple[Packing, list[int]]:
    """Return a group's microbatches, and the samples that did not fit."""
    batch, bucket = space.batch, space.buckets[b]
    row_tokens, shared_M = batch.empty_tokens(bucket)
    microbatches: Packing = []
    for _ in range(batch.capacity.group_size):
        free, rows = [0.0, *shared_M.tolist()], []
        for _ in range(batch.anchor_rows(bucket)):
            free[0] = row_tokens
            held, rest = [], []
            budget.spend(len(waiting) / _STEPS_PER_WORK)
            for i in waiting:
                size = sizes[i]
                if size[0] <= free[0] and all(map(le, size, free)):
                    held.append(i)
                    free = [*map(sub, free, size)]
                else:
                    rest.append(i)
            rows.append(sorted(held))
            waiting = rest
        microbatches.append(rows)
    return microbatches, waiting

"""How other frameworks deal the samples of a microbatch to data ranks: their rules over loads.

Rewritten from what is published of them; nothing is copied. A load is any cost of a sample, one
number; costs are given, so that a rule is not blamed for its estimate of them.

- `loongforge`: LoongForge's balancing of an LLM's data ranks, by its page "DP Load-Balancing"
  (docs/source/features/data_parallel_balancing.md of baidu-baige/LoongForge; defaults as given
  there). What its imbalance ratio divides by was read off its source: the mean rank.
- `bridge`: Megatron-Bridge's reordering inside a microbatch (its page "MegatronMIMO
  Intra-Microbatch Reordering" and pull request 4608, whose probe reads a busiest rank of 1.27 times
  the mean before and 1.07 after on its own data): longest first, equal counts on all ranks.
- `entrain`: of Entrain (arXiv 2605.27918) only the abstract and summaries could be read. They say
  that microbatches are assigned by levels, encoder workloads made equal first, and that excess
  workload is then deferred inside the iteration. How is ours: see the function.

Bins are ranks or microbatches, counted from 0. Ties go to the sample, and to the bin, of the
smaller number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]
Bins = NDArray[np.int64]

REFINEMENTS = 20  # of LoongForge, at most
TOLERANCE = 0.05  # what its heaviest rank may have above its lightest, of the lightest
TRIGGER = 0.2  # what its heaviest rank has above the mean, below which it does nothing
PACK_RATIO = 1.2  # tokens that its ranks may hold, over their mean


def lpt(
    load_N: Loads,
    n_bins: int,
    held_B: Loads | None = None,
    size_N: Loads | None = None,
    room: float = np.inf,
) -> Bins:
    """bins[N]: longest first, each to the bin of least load whose sizes stay within the room; to
    the one of least load where none has room.

    Args:
      held_B: load that bins have already.
      size_N: what of the room a sample takes.
    """
    load_N = np.asarray(load_N, float)
    size_N = np.zeros(len(load_N)) if size_N is None else np.asarray(size_N, float)
    load_B = np.zeros(n_bins) if held_B is None else np.array(held_B, float)
    size_B = np.zeros(n_bins)
    bins = np.zeros(len(load_N), np.int64)
    for i in np.argsort(-load_N, kind="stable").tolist():
        has_room_B = size_B + size_N[i] <= room
        bin_ = int(np.where(has_room_B | ~has_room_B.any(), load_B, np.inf).argmin())
        bins[i] = bin_
        load_B[bin_] += load_N[i]
        size_B[bin_] += size_N[i]
    return bins


def as_read(n: int, n_bins: int) -> Bins:
    """bins[N] as data ranks read them: every rank the next few samples, as many as the others."""
    return np.arange(n, dtype=np.int64) * n_bins // max(n, 1)


def over_mean(load_B: Loads) -> float:
    """The busiest bin over the mean; 1 where there is no load."""
    total = float(np.sum(load_B))
    return float(np.max(load_B)) * len(load_B) / total if total else 1.0


def bridge(load_N: Loads, n_bins: int) -> Bins:
    """bins[N] of Megatron-Bridge: longest first, each to the lightest bin that has not its share of
    the count. Its loads are vision patches or LLM tokens, or a sum of both by weights.

    It refuses counts that the bins do not divide; here a bin then takes the count rounded up.
    """
    n = len(load_N)
    return lpt(load_N, n_bins, size_N=np.ones(n), room=-(-n // n_bins))


def loongforge(load_N: Loads, token_N: Loads, n_bins: int, held_B: Loads | None = None) -> Bins:
    """bins[N] of LoongForge: as they were read where the heaviest bin is less than 20% above the
    mean or one sample is more than the mean; else longest first to the lightest bin that holds no
    more than 1.2 times the mean of the tokens, then at most 20 refinements.

    Args:
      load_N: its fitted a l^2 + b l + c of every sample.
      held_B: load of the bins in the microbatches before of the same step.
    """
    load_N, token_N = np.asarray(load_N, float), np.asarray(token_N, float)
    held_B = np.zeros(n_bins) if held_B is None else np.asarray(held_B, float)
    read = as_read(len(load_N), n_bins)
    before_B = held_B + np.bincount(read, load_N, n_bins)
    if not len(load_N) or over_mean(before_B) - 1 < TRIGGER or load_N.max() > before_B.mean():
        return read
    room = PACK_RATIO * token_N.sum() / n_bins
    bins = lpt(load_N, n_bins, held_B, token_N, room)
    for _ in range(REFINEMENTS):
        refined = _refined(load_N, token_N, bins, held_B, room)
        if refined is None:
            break
        bins = refined
    return bins


def _refined(load_N: Loads, token_N: Loads, bins: Bins, held_B: Loads, room: float) -> Bins | None:
    """The longest sample of the heaviest bin moved to the lightest one, or exchanged with its
    shortest: what of both leaves the least between the heaviest and the lightest bin of all. None:
    they are close already, or neither brings them closer."""
    load_B = held_B + np.bincount(bins, load_N, len(held_B))
    heavy, light = int(load_B.argmax()), int(load_B.argmin())
    if np.ptp(load_B) < TOLERANCE * load_B[light]:
        return None
    in_heavy, in_light = np.flatnonzero(bins == heavy), np.flatnonzero(bins == light)
    if not len(in_heavy) or not len(in_light):
        return None
    longest = in_heavy[load_N[in_heavy].argmax()]
    shortest = in_light[load_N[in_light].argmin()]
    best, least = None, float(np.ptp(load_B))
    for back in ([], [shortest]):
        tried = bins.copy()
        tried[longest], tried[back] = light, heavy
        token_B = np.bincount(tried, token_N, len(held_B))
        given = [light, heavy] if back else [light]
        spread = float(np.ptp(held_B + np.bincount(tried, load_N, len(held_B))))
        if spread < least and (token_B[given] <= room).all():
            best, least = tried, spread
    return best


def entrain(encoder_N: Loads, llm_N: Loads, n_ranks: int, n_microbatches: int) -> tuple[Bins, Bins]:
    """(ranks[N], microbatches[N]) of Entrain's LLM, as far as it is known.

    Ours, since the paper was not available: ranks by LPT over both modules' loads; on each rank
    microbatches by LPT over the encoder's loads, then samples without any by LPT over the LLM's.
    Then, from the first microbatch to the last but one, of what it holds of the LLM above the mean
    the samples that fit into this excess, longest first, are deferred to the next one.
    """
    encoder_N, llm_N = np.asarray(encoder_N, float), np.asarray(llm_N, float)
    ranks = lpt(encoder_N + llm_N, n_ranks)
    microbatches = np.zeros(len(llm_N), np.int64)
    for rank in range(n_ranks):
        held = np.flatnonzero(ranks == rank)
        seen = held[encoder_N[held] > 0]
        unseen = held[encoder_N[held] == 0]
        microbatches[seen] = lpt(encoder_N[seen], n_microbatches)
        load_M = np.bincount(microbatches[seen], llm_N[seen], n_microbatches).astype(float)
        microbatches[unseen] = lpt(llm_N[unseen], n_microbatches, load_M)
        microbatches[held] = _deferred(llm_N[held], microbatches[held], n_microbatches)
    return ranks, microbatches


def _deferred(load_N: Loads, microbatches: Bins, n_microbatches: int) -> Bins:
    """Microbatches of one rank's samples, what is above the mean deferred."""
    deferred = microbatches.copy()
    mean = float(load_N.sum()) / n_microbatches
    for m in range(n_microbatches - 1):
        held = np.flatnonzero(deferred == m)
        excess = float(load_N[held].sum()) - mean
        for i in held[np.argsort(-load_N[held], kind="stable")]:
            if 0 < load_N[i] <= excess:
                deferred[i] = m + 1
                excess -= float(load_N[i])
    return deferred

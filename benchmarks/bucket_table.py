"""Padding under sets of compiled shapes, ours and the obvious ones, on held-out batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table
from schedule_data import embedded_shapes, trace_shapes

from dflop_jax.records import Bucket, SampleShape
from dflop_jax.schedule import Capacity, choose_buckets, evaluate_buckets
from dflop_jax.schedule.shapes.choose import even_seconds

K = 4
HELD_OUT_BATCHES = 6


@dataclass(frozen=True)
class Setting:
    """Data, mesh and batch for which shapes are chosen."""

    name: str
    vision_ranks: int
    llm_ranks: int
    token_multiple: int
    global_batch: int
    max_microbatches: int = 16


def alternatives(
    shapes: Sequence[SampleShape], s: Setting, ours: Sequence[Bucket], seed: int
) -> dict[str, tuple[Bucket, ...]]:
    """Sets that hold every sample: one bucket of the main size; powers of two from there; quantiles
    of what random microbatches of the same mean size need."""
    longest = max(x.llm_tokens for x in shapes)
    widest = -(-max(x.tiles for x in shapes) // s.vision_ranks)
    main = max(ours, key=lambda b: b.tokens)

    def bucket(tiles: float, tokens: float) -> Bucket:
        return Bucket(int(np.ceil(tiles)), -int(-tokens // s.token_multiple) * s.token_multiple)

    top_tiles, top_tokens = (2 ** int(np.ceil(np.log2(x))) for x in (main.tiles, main.tokens))
    powers = {Bucket(top_tiles >> i, max(s.token_multiple, top_tokens >> i)) for i in range(K)}
    per_microbatch = max(1, s.global_batch * main.tokens * s.llm_ranks // volume(shapes, s))
    picks = np.random.default_rng(seed).choice(len(shapes), (256, per_microbatch))
    tokens = np.array([x.llm_tokens for x in shapes])[picks].sum(axis=1) / s.llm_ranks
    tiles = np.array([x.tiles for x in shapes])[picks].sum(axis=1) / s.vision_ranks
    cuts = np.linspace(0, 1, K + 1)[1:]
    some = {bucket(np.quantile(tiles, q), np.quantile(tokens, q)) for q in cuts}
    some.add(bucket(max(widest, tiles.max()), max(longest, tokens.max())))
    ranked = sorted(some, key=lambda b: -b.tokens)[:K]
    return {
        "one bucket": (main,),
        "powers of two": tuple(sorted(powers, key=lambda b: -b.tokens)),
        "quantiles": tuple(ranked),
    }


def volume(shapes: Sequence[SampleShape], s: Setting) -> int:
    """LLM tokens of an average global batch."""
    return sum(x.llm_tokens for x in shapes) * s.global_batch // len(shapes)


def bucket_table(traces: Path | None, seeds: Sequence[int], *, quick: bool) -> Table:
    """Padded share of executed tokens and tiles, mean over held-out batches and seeds."""
    settings = [Setting("embedded", 2, 6, 32, 256), Setting("embedded", 4, 4, 32, 256)]
    if traces:
        settings += [Setting("shapes", 2, 6, 128, 256), Setting("shapes", 4, 4, 128, 512)]
    out = Table(
        "data (vision + LLM ranks)", "batch", "shapes", "padded tokens %", "padded tiles %",
        "makespan", title=f"padding with at most {K} shapes, held-out batches",
    )  # fmt: skip
    for s in settings[:1] if quick else settings:
        every = embedded_shapes() if s.name == "embedded" else trace_shapes(traces or Path())
        capacity = Capacity(s.vision_ranks, s.llm_ranks)
        found: dict[str, list[tuple[float, float, float]]] = {}
        for seed in seeds:
            rng = np.random.default_rng(seed)
            order = rng.permutation(len(every))
            seen = [every[i] for i in order[: len(every) // 2]]
            largest = max(every, key=lambda x: (x.llm_tokens, x.tiles))
            widest = max(every, key=lambda x: (x.tiles, x.llm_tokens))
            seen += [largest, widest]  # a profile knows the limits that data loading enforces
            held = [every[i] for i in order[len(every) // 2 :]]
            batches = [
                [held[i] for i in rng.choice(len(held), s.global_batch)]
                for _ in range(HELD_OUT_BATCHES)
            ]
            seconds = even_seconds(seen, capacity, s.global_batch, s.max_microbatches)
            choice = choose_buckets(
                seen,
                global_batch=s.global_batch,
                n_buckets=K,
                vision_ranks=s.vision_ranks,
                llm_ranks=s.llm_ranks,
                token_multiple=s.token_multiple,
                max_microbatches=s.max_microbatches,
                effort="quick" if quick else "full",
                seed=seed,
            )
            sets = {"ours": choice.buckets} | alternatives(seen, s, choice.buckets, seed)
            for name, buckets in sets.items():
                r = evaluate_buckets(buckets, batches, capacity, seconds)
                row = (r.padding["llm"], r.padding["vision"], r.expected_s)
                found.setdefault(name, []).append(row)
        for name, values in found.items():
            tokens, tiles, span = np.mean(values, axis=0)
            worst = np.max(values, axis=0)
            out.add_row(
                f"{s.name} ({s.vision_ranks} + {s.llm_ranks})",
                str(s.global_batch),
                name,
                f"{100 * tokens:.1f} (worst seed {100 * worst[0]:.1f})",
                f"{100 * tiles:.1f} (worst seed {100 * worst[1]:.1f})",
                f"{span:.3f}",
            )
    return out

"""Padding and steps under sets of compiled shapes, ours and obvious ones, on held-out batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table
from schedule_data import TILE_TOKENS, trace_loads
from shape_problems import even_seconds, problem_of, whole_modules

from dflop_jax.records import Bucket, Edge, Load, Shape
from dflop_jax.schedule import ShapeProblem, choose_buckets, evaluate_buckets, oversize

K = 4
HELD_OUT_BATCHES = 6


@dataclass(frozen=True)
class Setting:
    """Mesh and batch for which shapes are chosen."""

    vision_ranks: int
    llm_ranks: int
    global_batch: int

    def problem(self, loads: Sequence[Load]) -> ShapeProblem:
        """Both modules are equally busy on these loads."""
        ranks = {"vision": self.vision_ranks, "llm": self.llm_ranks}
        return problem_of(
            whole_modules(ranks, (Edge("vision", "llm", "vision"),)),
            even_seconds(loads, ranks, self.global_batch),
            self.global_batch,
            piece_tokens={"vision": TILE_TOKENS},
            n_buckets=K,
        )


SETTINGS = (Setting(2, 6, 64), Setting(2, 6, 256), Setting(4, 4, 512))


def alternatives(
    loads: Sequence[Load], problem: ShapeProblem, ours: Sequence[Bucket], seed: int
) -> dict[str, tuple[Bucket, ...]]:
    """Sets that hold every sample: one bucket of the main size; powers of two from there; quantiles
    of what random microbatches of the same mean size need."""
    main = max(ours, key=lambda b: (b.tokens("llm"), b.tokens("vision")))
    multiple = problem.token_multiple

    def bucket(tiles: float, tokens: float) -> Bucket:
        length = math.ceil(tokens / multiple) * multiple
        tiles = max(1, math.ceil(tiles))
        return Bucket.of({"vision": Shape(tiles, TILE_TOKENS), "llm": Shape(1, length)})

    tiles_of_main = main.tokens("vision") / TILE_TOKENS
    top = [2 ** math.ceil(math.log2(max(1, x))) for x in (tiles_of_main, main.tokens("llm"))]
    powers = [bucket(top[0] / 2**i, max(multiple, top[1] / 2**i)) for i in range(K)]
    ranks = problem.ranks
    tokens_N = np.array([x.tokens("llm") for x in loads])
    tiles_N = np.array([len(x.lengths("vision")) for x in loads])
    each = max(1, round(main.tokens("llm") * ranks["llm"] / tokens_N.mean()))
    picks = np.random.default_rng(seed).choice(len(loads), (256, each))
    tokens = tokens_N[picks].sum(axis=1) / ranks["llm"]
    tiles = tiles_N[picks].sum(axis=1) / ranks["vision"]
    cuts = np.linspace(0, 1, K + 1)[1:-1]
    some = [bucket(np.quantile(tiles, q), np.quantile(tokens, q)) for q in cuts]
    widest = max(tiles.max(), tiles_N.max() / ranks["vision"])
    some.insert(0, bucket(widest, max(tokens_N.max(), tokens.max())))
    return {"one bucket": (main,), "powers of two": tuple(powers), "quantiles": tuple(some)}


def bucket_table(traces: Path, seeds: Sequence[int], *, quick: bool) -> Table:
    """Padded share of executed tokens, and simulated steps, means over held-out batches and
    seeds."""
    out = Table(
        "ranks (vision + LLM)", "batch", "shapes", "padded LLM %", "padded vision %", "step",
        title=f"at most {K} shapes, held-out batches; step 1: no padding in either module",
    )  # fmt: skip
    every = trace_loads(traces)
    for s in SETTINGS[:1] if quick else SETTINGS:
        found: dict[str, list[tuple[float, float, float]]] = {}
        for seed in seeds:
            order = np.random.default_rng(seed).permutation(len(every))
            seen = [every[i] for i in order[: len(every) // 2]]
            # a profile knows the limits that data loading enforces
            seen.append(max(every, key=lambda x: (x.tokens("llm"), x.tokens("vision"))))
            seen.append(max(every, key=lambda x: (x.tokens("vision"), x.tokens("llm"))))
            rest = [every[i] for i in order[len(every) // 2 :]]
            rng = np.random.default_rng(seed)
            batches = [
                [rest[i] for i in rng.choice(len(rest), s.global_batch)]
                for _ in range(1 if quick else HELD_OUT_BATCHES)
            ]
            problem, effort = s.problem(seen), "quick" if quick else "full"
            ours = choose_buckets(seen, problem, effort=effort, seed=seed).buckets
            for name, buckets in ({"ours": ours} | alternatives(seen, problem, ours, seed)).items():
                if oversize([x for b in batches for x in b], buckets, problem.capacity):
                    continue
                r = evaluate_buckets(buckets, batches, problem)
                row = (r.padding["llm"], r.padding["vision"], r.expected_s)
                found.setdefault(name, []).append(row)
        for name, values in found.items():
            llm, vision, step_s = np.mean(values, axis=0)
            out.add_row(
                f"{s.vision_ranks} + {s.llm_ranks}",
                str(s.global_batch),
                name,
                f"{100 * llm:.1f}",
                f"{100 * vision:.1f}",
                f"{step_s:.3f}",
            )
    return out

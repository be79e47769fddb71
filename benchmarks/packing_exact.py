"""Do samples that are packed into one row leave each other alone, to the bit?

Command:  python benchmarks/packing_exact.py [--cases N] [--families NAME ...] [--without resets]
          [--dtype bfloat16] [--json FILE]
Minutes:  15 at most with --cases 300 on two cores
Expected: no leak and no case over its limit (1e-5, or 0.2 in bfloat16, whose rounding alone was
          seen to make 0.08; more where a sample's rounding is more), for every family; with
          `--without resets` leaks in every one, and an exit code of 0 all the same

A case is a random packing of samples, of texts, pictures, clips and sounds, from a few tokens to
more than three chunks of linear attention, on a plan that cuts every module in two. It runs twice,
as a run computes it, with the loss of one of the samples alone: once as it is, once with all other
samples replaced by others of equal lengths. It leaks if anything of that sample differs by a bit:
hidden states between segments, features that modules give, the loss, any parameter's gradient.
`max_error_alone` is the largest difference to that sample alone, computed without the engine, as a
share of the largest entry, of each tensor, and in float32 on a CPU.

Some samples make rounding larger, packed or alone: sums over tokens that nearly cancel. So every
sample is computed alone once more, with each entry of the parameters moved to the next float32, up
or down; `max_rounding` is the largest difference that this makes. A case is `over` if its error is
above 1e-5 (0.2 in bfloat16) and above three times that difference of its own sample.

On a GPU the packed samples run there, all families at the same time. In float32 its kernels are
those of the rows named so, which a CPU interprets; in bfloat16 those that a run of any row has.

`--without resets` is a control: states are carried on from piece to piece, and, in families that
have none, every row is told to be one piece.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from packing_alone import AloneRun  # noqa: E402
from packing_cases import (  # noqa: E402
    PackedRun,
    differ,
    largest_error,
    random_packing,
    random_parameters,
)
from packing_families import FAMILIES, Family, drawings  # noqa: E402

LEAST_CASES = 20  # of a family
LIMITS = {"float32": 1e-5, "bfloat16": 0.2}  # of a case's error
# Times what moving parameters changes in its sample alone: draws differ, and of six the least made
# 1/2.8 of an error (docs/models.md).
ROUNDINGS = 3
Row = dict[str, Any]


def measure(name: str, cases: int, *, resets: bool = True, dtype: str = "float32") -> Row:
    """Pack a family so many times."""
    family = replace(FAMILIES[name], dtype=dtype)
    # GPUs else take 10 bits of each factor of a float32 product.
    precision = jax.default_matmul_precision("highest" if dtype == "float32" else None)
    with precision, nullcontext() if resets else family.without_resets():
        # What has a state is told of pieces all the same, so that attention keeps them apart.
        return _measured(name, family, cases, merges=not (resets or family.state))


def _measured(name: str, family: Family, cases: int, *, merges: bool) -> Row:
    begun_s = time.perf_counter()
    model, number = family.model, list(FAMILIES).index(name)
    params, ways = random_parameters(family.plainly), drawings(model)
    packed = PackedRun(model, params)
    by_itself = AloneRun(family.plainly.model, params, packed.layout)
    leaks, over, worst, rounding = 0, 0, 0.0, 0.0
    try:
        for case in range(cases):
            rng = np.random.default_rng((number, case))
            packing, drawn_by = random_packing(model, ways, rng)
            target = int(rng.integers(len(packing.samples)))
            others = [
                sample if i == target else way(int(rng.integers(1 << 30)))
                for i, (sample, way) in enumerate(zip(packing.samples, drawn_by, strict=True))
            ]
            seen = packed.of(packing, target, merges=merges)
            again = packed.of(replace(packing, samples=others), target, merges=merges)
            leaks += differ(seen, again)
            alone = by_itself.of(packing.samples[target])
            error = largest_error(seen, alone)
            own = largest_error(by_itself.of(packing.samples[target], moved=True), alone)
            over += is_over(error, own, family.dtype)
            worst, rounding = (float(np.maximum(*ab)) for ab in ((worst, error), (rounding, own)))
    finally:
        packed.close()
    return {
        "family": name,
        "cases": cases,
        "leaks": leaks,
        "over": over,
        "max_error_alone": worst,
        "max_rounding": rounding,
        "dtype": family.dtype,
        "device": jax.devices()[0].device_kind,
        "seconds": time.perf_counter() - begun_s,
    }


def is_over(error: float, rounding: float, dtype: str) -> bool:
    """Whether an error, or what is no number, is above the limit, given the sample's rounding."""
    return not error <= max(LIMITS[dtype], ROUNDINGS * rounding)


def shares(cases: int, names: Sequence[str]) -> dict[str, int]:
    """How many of the cases each family has."""
    each, more = divmod(cases, len(names))
    return {name: max(LEAST_CASES, each + (i < more)) for i, name in enumerate(names)}


def measured(counts: dict[str, int], *, resets: bool, dtype: str) -> Iterator[Row]:
    """The rows of all families as they come, on every core."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several share a GPU
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    spawn = multiprocessing.get_context("spawn")
    work = partial(measure, resets=resets, dtype=dtype)
    with ProcessPoolExecutor(min(cores or 1, len(counts)), spawn) as pool:
        for done in as_completed([pool.submit(work, *job) for job in counts.items()]):
            yield done.result()


def framed(rows: Sequence[Row]) -> Row:
    """What --json holds."""
    families = {r["family"]: {k: v for k, v in r.items() if k != "family"} for r in rows}
    return {"cases": sum(r["cases"] for r in rows), "families": families}


def as_expected(row: Row, *, resets: bool) -> bool:
    """Whether a family does what it should, or, without resets, what it must not do."""
    if not resets:
        return row["leaks"] > 0
    return row["leaks"] == row["over"] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    most = f"of all families together, at least {LEAST_CASES} of each"
    parser.add_argument("--cases", type=int, default=300, metavar="N", help=most)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--without", choices=["resets"], help="leave this out, as a control")
    parser.add_argument("--dtype", choices=LIMITS, default="float32", help="of what is packed")
    add_json(parser)
    args = parser.parse_args()
    if args.cases < 1:
        parser.error(f"--cases {args.cases}: it takes one at least")
    resets = args.without != "resets"
    rows = Rows(args.json, framed)
    for row in measured(shares(args.cases, args.families), resets=resets, dtype=args.dtype):
        rows.append(row)
    errors = "error to alone", "rounding", "over"  # the largest
    table = Table("family", "cases", "leaks", *errors, "seconds", "as expected")
    for row in sorted(rows, key=lambda r: list(FAMILIES).index(r["family"])):
        right = "yes" if as_expected(row, resets=resets) else "NO"
        error, rounding = (f"{row[k]:.1e}" for k in ("max_error_alone", "max_rounding"))
        counts = (str(row[k]) for k in ("cases", "leaks"))
        ends = str(row["over"]), f"{row['seconds']:.0f}", right
        table.add_row(row["family"], *counts, error, rounding, *ends)
    Console().print(table)
    return 0 if all(as_expected(row, resets=resets) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

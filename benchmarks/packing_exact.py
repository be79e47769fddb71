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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from json_rows import Rows, add_json
from packing_cases import (
    PackedRun,
    Seen,
    alone,
    differ,
    largest_error,
    leaves_of,
    pack_all,
    random_packing,
    random_parameters,
    tokens_of,
)
from packing_families import FAMILIES, Family, drawings
from rich.console import Console
from rich.table import Table

from dflop_jax.contract import (
    MultimodalModel,
    adapter_of,
    edges_of,
    layer_kinds_of,
    layer_of,
    taps_of,
    with_adapter,
)
from dflop_jax.data import Sample
from dflop_jax.records import Layout, Schedule
from dflop_jax.verify.compare import COMPILER_OPTIONS

Tree = Any


class AloneRun:
    """Samples by themselves, by given parameters or by ones of which every entry is moved, up or
    down at random, to the next number of its dtype: as far as that takes what comes out, rounding
    alone may."""

    def __init__(self, model: MultimodalModel, params: Mapping[str, Tree], layout: Layout):
        self._model, self._params, self._layout = model, params, layout
        self._moved = jax.tree.map(partial(_to_neighbours, np.random.default_rng(0)), params)
        cuts = {m: frozenset(s.stop for s in layout.segments_of(m) if not s.last)
                for m in model.modules}  # fmt: skip
        run = jax.value_and_grad(partial(_loss, model, cuts), has_aux=True)
        self._run = jax.jit(run, compiler_options=COMPILER_OPTIONS)

    def of(self, sample: Sample, *, moved: bool = False) -> Seen:
        """What comes out of a sample that is packed with nothing.

        Args:
          moved: whether by the moved parameters.
        """
        packing, shapes = alone(self._model, sample)
        schedule = Schedule(0, packing.groups(self._model, shapes))
        packed = pack_all(self._model, self._layout, schedule, [sample])
        modules = [g.module for g in schedule.groups]
        fields = {m: {k: a[0] for k, a in p.fields.items()}
                  for m, p in zip(modules, packed, strict=True)}  # fmt: skip
        places = {
            (modules[source], modules[g]): tuple(a[0] for a in where)
            for g, p in enumerate(packed)
            for source, where in p.gathers.items()
        }
        with jax.default_device(jax.devices("cpu")[0]):
            params = self._moved if moved else self._params
            (loss, given), gradients = self._run(params, fields, places)
        where = tokens_of(self._model, packing, 0, schedule, packed)
        outputs = {"loss": np.asarray(loss)}
        for name, array in given.items():
            module, what, *_ = name.split(" ")
            flat = np.asarray(array)
            if what == "after":
                outputs[name] = flat[where.tokens[module]]
            elif module in where.features:
                outputs[name] = flat.reshape(-1, flat.shape[-1])[where.features[module]]
        flat_gradients = {path: np.asarray(leaf) for path, leaf in leaves_of(gradients)}
        return Seen(outputs, flat_gradients)


def _to_neighbours(rng: np.random.Generator, a: np.ndarray) -> np.ndarray:
    ends = np.where(rng.random(a.shape) < 0.5, -np.inf, np.inf).astype(a.dtype)
    return np.nextafter(a, ends)


def _loss(
    model: MultimodalModel,
    cuts: Mapping[str, frozenset[int]],
    params: Mapping[str, Tree],
    fields: Mapping[str, Mapping[str, jax.Array]],
    places: Mapping[tuple[str, str], Sequence[jax.Array]],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the sum of all losses, hidden states at the cuts and features that modules give)."""
    given: dict[str, jax.Array] = {}
    loss = jnp.float32(0)
    for name, module in model.modules.items():
        if name not in fields:
            continue
        batch, inlets = dict(fields[name]), {}
        for edge in (e for e in edges_of(model) if e.target == name):
            rows, tokens = batch["segment_ids"].shape
            spec = module.field_spec(edge.name, rows, tokens)
            batch.setdefault(edge.name, jnp.zeros(spec.shape, spec.dtype))
            if edge.enters >= 0:
                inlets[edge.name] = edge.enters
            if edge.source in fields and (edge.source, name) in places:
                features = given[f"{edge.source} gives {edge.tap}"]
                batch[edge.name] += _read(features, *places[edge.source, name])
        loss += _through(name, module, params[name], batch, inlets, cuts[name], given)
    return loss, given


def _through(
    name: str,
    module: Any,
    params: Tree,
    batch: Mapping[str, jax.Array],
    inlets: Mapping[str, int],
    cuts: frozenset[int],
    given: dict[str, jax.Array],
) -> jax.Array:
    """Run a module, put what it gives into `given`, and return its loss."""
    x, done = module.entry(params["entry"], batch), Counter[str]()
    for i, kind in enumerate(("", *layer_kinds_of(module))):
        if i:
            own = {p: params[p] for p in (kind, adapter_of(kind)) if p in params}
            row = jax.tree.map(lambda a, n=done[kind]: a[n], own)
            x = layer_of(module, kind)(with_adapter(kind, row), x, batch)
            done[kind] += 1
        if i in cuts:
            given[f"{name} after {i}"] = x
        for inlet in (n for n, layers in inlets.items() if layers == i):
            x = module.inlet(inlet, x, batch[inlet], batch)
        for tap in (t for t, layers in taps_of(module).items() if layers == i):
            given[f"{name} gives {tap}"] = module.tap(tap, params.get(tap), x, batch)
    out = module.exit(params["exit"], x, batch, params["entry"] if module.tied else None)
    if isinstance(out, dict):
        return out["loss_sum"]
    given[f"{name} gives "] = out
    return jnp.float32(0)


def _read(features: jax.Array, index: jax.Array, weight: jax.Array | None = None) -> jax.Array:
    """Features [rows, tokens, width] at places [rows, tokens, sources], each token's added up."""
    flat = features.reshape(-1, features.shape[-1])
    share = jnp.where(index >= 0, 1.0 if weight is None else weight, 0.0)
    return jnp.einsum("rtk,rtkw->rtw", share.astype(flat.dtype), flat[jnp.maximum(index, 0)])


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

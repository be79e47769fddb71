"""Golden values: plans, makespans, losses and gradients that a refactoring must not make worse.

Command:  python -m tests.golden.make [--check] [--only NAME ...]
Minutes:  about 4 on 2 cores
Expected: without --check it writes the JSON files beside this script; with --check it writes none,
          prints one line per golden value and exits with 1 if a value is worse than the stored one

- plans: six set-ups of the planner on modelled GPUs, with their simulated step times;
- batches: makespans and lower bounds of the batches of `benchmarks/schedule_run.py`;
- losses: 12 steps of the demo under every policy, read from the metrics that the CLI writes;
- gradients: one step of the small model under each layout of the gradient tests.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from experiments.paper.evaluation import evaluate
from tests import conftest  # noqa: F401  it sets XLA's flags and 8 CPU devices
from tests.benchmarks.scripts import module
from tests.runtime import plain
from tests.runtime.test_gradients import PLANS, ZERO, grads_of, oracle, planned

auto_choice, schedule_run = module("auto_choice"), module("schedule_run")
CLI = (sys.executable, "-m", "dflop_jax.cli", "train")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POLICIES = ("blind", "megatron", "pytorch", "dflop", "dip", "orch", "auto")
# (set-up, policy) on so many devices with so many samples; the test plans the first of them.
SET_UPS = (("VLM-S", "blind"), ("T2V-S", "auto"), ("VLM-S", "dflop"), ("T2V-S", "dip"),
           ("random 0", "orch"), ("random 5", "auto"))  # fmt: skip
DEVICES, BATCH = 8, 32
QUICK_SIZES = ((256, 32),)  # samples and data ranks of the batches that the test schedules
QUICK_POLICIES = ("orch",)  # half a minute, so the test of losses is marked slow
QUICK_LAYOUTS = 3
MAX_MAKESPAN = 1.005  # new over stored makespan
MIN_BOUND = 0.98  # new over stored lower bound, the median
LOSS_RTOL, LOSS_RTOL_OTHER_JAX, GRADIENT_RTOL = 1e-6, 1e-3, 1e-4

Values = dict[str, Any]  # by name of a golden value
Line = tuple[str, bool]  # the comparison of a golden value, and whether the new value is worse


def make_plans(quick: bool) -> Values:
    """Policy, layout and seconds of a simulated step of every set-up."""
    cases = {c.name: c for c in auto_choice.PAPER_CASES}
    cases |= {c.name: c for c in map(auto_choice.random_case, range(6))}
    values = {}
    for name, policy in SET_UPS[: 1 if quick else None]:
        case = replace(cases[name], n_devices=DEVICES, global_batch=BATCH)
        # The text-to-video model promotes types, which the tests' strict mode refuses.
        with jax.numpy_dtype_promotion("standard"):
            evaluation = evaluate(case, policy)
        if evaluation.plan is None:
            raise RuntimeError(f"{name} has no plan under {policy}: {evaluation.description}")
        found = {
            "policy": evaluation.plan.policy,
            "layout": evaluation.description,
            "makespan_s": evaluation.step_s,
        }
        values[f"{name}, {policy}, {DEVICES} devices"] = found
    return values


def make_batches(quick: bool) -> Values:
    """Makespan and lower bound of every batch, scheduled as a run schedules it."""
    sizes = QUICK_SIZES if quick else schedule_run.SIZES
    run = {"run": schedule_run.METHODS["run"]}
    with mock.patch.dict(schedule_run.METHODS, run, clear=True):
        rows = schedule_run.rows_of(schedule_run.TRACES, sizes, schedule_run.SEEDS, "full")
        return {
            f"{r.data}, {r.samples} x {r.ranks}, seed {r.seed}": {
                "makespan_s": r.step_s,
                "lower_bound_s": r.step_s / (1 + r.gap),
            }
            for r in rows
        }


def make_losses(quick: bool) -> Values:
    """Losses of every step of the demo by policy; one process with 4 CPU devices."""
    values = {}
    with tempfile.TemporaryDirectory() as folder:
        for policy in QUICK_POLICIES if quick else POLICIES:
            run_dir = Path(folder, policy)
            command = [
                *CLI, "experiments/demo.py", "--model.size", "nano", "--plan.devices", "4",
                "--plan.policy", policy, "--run_dir", str(run_dir),
                "--cache_dir", str(Path(folder, "cache")),
            ]  # fmt: skip
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"policy {policy} failed:\n{done.stdout}{done.stderr}"[-4000:])
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            values[policy] = [json.loads(line)["loss"] for line in lines]
    return values


def make_gradients(quick: bool) -> Values:
    """By layout the loss, the gradients' norm of every module, and by parameter the gradients' norm
    and the entry of largest magnitude."""
    values = {}
    for name in list(PLANS)[: QUICK_LAYOUTS if quick else None]:
        model, plan = planned(PLANS[name])
        plan = plain.with_zero(plan, **ZERO.get(name, {}))
        samples = oracle(model)[0]
        schedule = plain.random_schedule(plan, samples, 2, seed=len(name), text_only=(0,))
        loss, grads, *_ = grads_of(model, plan, samples, schedule)
        digest = {"loss": float(loss)}
        for module_name, tree in grads.items():
            leaves = jax.tree_util.tree_leaves_with_path(tree)
            digest[f"norm of {module_name}"] = norm([leaf for _, leaf in leaves])
            for path, leaf in leaves:
                flat = np.ravel(leaf)
                at = module_name + jax.tree_util.keystr(path)
                digest[f"norm of {at}"] = norm([flat])
                digest[f"largest of {at}"] = float(flat[np.abs(flat).argmax()])
        values[name] = {k: float(f"{v:.8g}") for k, v in digest.items()}
    return values


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Euclidean norm of all entries together."""
    return math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in arrays))


def compare_plans(old: Values, new: Values, _: bool) -> Iterator[Line]:
    for name, now in new.items():
        before = old[name]
        text = f"{name}: {before['makespan_s']:.4f} s -> {now['makespan_s']:.4f} s"
        for key in ("policy", "layout"):
            if now[key] != before[key]:
                text += f"; other {key}: {before[key]} -> {now[key]}"
        yield text, not now["makespan_s"] <= MAX_MAKESPAN * before["makespan_s"]


def compare_batches(old: Values, new: Values, _: bool) -> Iterator[Line]:
    ratios = []
    for name, now in new.items():
        before_s, now_s = (v["makespan_s"] for v in (old[name], now))
        ratios.append(now["lower_bound_s"] / old[name]["lower_bound_s"])
        text = f"{name}: {before_s:.5f} s -> {now_s:.5f} s, bound {ratios[-1]:.4f} times"
        yield text, not now_s <= MAX_MAKESPAN * before_s
    median = statistics.median(ratios)
    yield f"lower bounds, new over old, median: {median:.4f}", not median >= MIN_BOUND


def compare_losses(old: Values, new: Values, same_jax: bool) -> Iterator[Line]:
    rtol = LOSS_RTOL if same_jax else LOSS_RTOL_OTHER_JAX
    for policy, now in new.items():
        error = largest_error(old[policy], now)
        yield f"{policy}: largest relative difference {error:.1e}", not error <= rtol


def compare_gradients(old: Values, new: Values, _: bool) -> Iterator[Line]:
    for name, now in new.items():
        before = old[name]
        same = before.keys() == now.keys()
        error = largest_error([*before.values()], [*now.values()]) if same else math.inf
        yield f"{name}: largest relative difference {error:.1e}", not error <= GRADIENT_RTOL


def largest_error(old: Sequence[float], new: Sequence[float]) -> float:
    """Largest relative difference; infinite if the numbers of values differ."""
    if len(old) != len(new):
        return math.inf
    each = [abs(b - a) / abs(a) if a else abs(b) for a, b in zip(old, new)]
    return max(each) if all(map(math.isfinite, each)) else math.inf


# How values are made, all or those of the test, and how they are compared (old, new, whether the
# same jax made both).
GOLDENS = {
    "plans": (make_plans, compare_plans),
    "batches": (make_batches, compare_batches),
    "losses": (make_losses, compare_losses),
    "gradients": (make_gradients, compare_gradients),
}


def check(name: str, *, quick: bool = False) -> list[Line]:
    """Compare new values with the stored ones."""
    stored = json.loads((HERE / f"{name}.json").read_text())
    make, compare = GOLDENS[name]
    return list(compare(stored["values"], make(quick), stored["jax"] == jax.__version__))


def write(name: str) -> None:
    """Store new values, one line for each."""
    values = GOLDENS[name][0](False)
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in values.items())
    text = f'{{"jax": {json.dumps(jax.__version__)}, "values": {{\n{lines}\n}}}}\n'
    (HERE / f"{name}.json").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the files")
    parser.add_argument("--only", nargs="+", choices=GOLDENS, default=[*GOLDENS])
    args = parser.parse_args()
    n_worse = 0
    for name in args.only:
        start_s = time.perf_counter()
        if args.check:
            for text, is_worse in check(name):
                print(f"{name}: {'WORSE' if is_worse else 'ok   '} {text}", flush=True)
                n_worse += is_worse
        else:
            write(name)
        print(f"{name}: {time.perf_counter() - start_s:.0f} s", flush=True)
    if args.check:
        print(f"{n_worse} values are worse" if n_worse else "no value is worse")
    return 1 if n_worse else 0


if __name__ == "__main__":
    sys.exit(main())

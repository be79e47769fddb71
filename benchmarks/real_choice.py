"""What `auto` chose, beside every policy, on two real processes and six mixes of data.

Command:  python benchmarks/real_choice.py [--json FILE] [--repeats N] [--steps N] [--mixes NAME]
Minutes:  not timed on free cores yet; 120 short runs
Expected: `auto` is never behind the best measured policy by more than the spread of its repeats

Each process computes on a core of its own. On every mix the policies train the same model on the
same batches, by turns: all of them once, then all again. A repeat's time is its median step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.config import Policy

RUNS = Path("runs/real_choice")
WARMUP = 4  # steps left out of every median
POLICIES: tuple[Policy, ...] = ("auto", "dflop", "orch", "dip")
MIXES = {  # share of each kind of scene
    "as usual": {"picture": 0.66, "pictures": 0.1, "clip": 0.12, "text": 0.12},
    "text": {"picture": 0.15, "pictures": 0.0, "clip": 0.05, "text": 0.8},
    "pictures": {"picture": 1.0, "pictures": 0.0, "clip": 0.0, "text": 0.0},
    "several pictures": {"picture": 0.1, "pictures": 0.8, "clip": 0.0, "text": 0.1},
    "clips": {"picture": 0.1, "pictures": 0.0, "clip": 0.8, "text": 0.1},
    "clips and text": {"picture": 0.0, "pictures": 0.0, "clip": 0.4, "text": 0.6},
}


def config(mix: str, policy: Policy, steps: int, size: str) -> Config:
    return Config(
        model=ModelConfig(size=size),
        data=DataConfig(n_samples=2048, seed=list(MIXES).index(mix)),  # profiles go by the seed
        plan=PlanConfig(
            policy=policy, max_model=1, max_stage=2, max_microbatches=16, effort="quick"
        ),
        train=TrainConfig(steps=steps, global_batch=64),
        checkpoint=CheckpointConfig(every=0),
        run_dir=str(RUNS / policy),
    )


# ---- in each of the two processes ----


def measure(mix: str, steps: int, repeats: int, size: str, out: Path) -> None:
    """Train under every policy by turns; process 0 writes the medians."""
    from dflop_jax.data.datasets import scenes
    from dflop_jax.record_files import load
    from dflop_jax.records import Plan
    from dflop_jax.report.run_folder import read_metrics
    from dflop_jax.train.prepare import set_up
    from dflop_jax.train.profiling import make_profile
    from dflop_jax.train.trainer import Trainer

    scenes.MIXTURE.update(MIXES[mix])
    place = set_up(config(mix, "auto", steps, size))
    profile = make_profile(place, place.source())
    rows: dict[str, dict] = {p: {"step_s": [], "plan": "", "predicted_s": 0.0} for p in POLICIES}
    plans = {}
    for _ in range(repeats):
        for policy in POLICIES:
            run = config(mix, policy, steps, size)
            Trainer(run, plan=plans.get(policy), profile=profile, existing="overwrite").fit()
            plan = plans[policy] = load(Plan, Path(run.run_dir) / "plan.json")
            if place.peers.is_hub:
                took_s = [r["step_s"] for r in read_metrics(run.run_dir)[WARMUP:]]
                rows[policy]["step_s"].append(statistics.median(took_s))
                rows[policy]["plan"] = plan.policy
                rows[policy]["predicted_s"] = plan.predicted.makespan_s
    if place.peers.is_hub:
        out.write_text(json.dumps(rows))


# ---- the one that starts them ----


def behind(rows: dict[str, dict]) -> tuple[float, float]:
    """(how far `auto` is behind the best policy by medians, spread of its repeats), both over the
    best."""
    medians = {p: statistics.median(r["step_s"]) for p, r in rows.items()}
    best_s, own = min(medians.values()), rows["auto"]["step_s"]
    return medians["auto"] / best_s - 1, (max(own) - min(own)) / best_s


def show(found: dict[str, dict[str, dict]]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ("mix", *(f"{p}, ms (min - max)" for p in POLICIES), "takes", "behind", "spread")
    table = Table(*columns, title="two processes, a core each")
    for mix, rows in found.items():
        each = []
        for p in POLICIES:
            took = sorted(1e3 * s for s in rows[p]["step_s"])
            each.append(f"{statistics.median(took):.0f} ({took[0]:.0f} - {took[-1]:.0f})")
        late, spread = (f"{100 * x:.1f}%" for x in behind(rows))
        table.add_row(mix, *each, rows["auto"]["plan"], late, spread)
    Console(width=150).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16, help=f"of a run; {WARMUP} warm up")
    parser.add_argument("--size", default="tiny+tiny-short", help="of the model")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps <= WARMUP or args.repeats < 1:
        parser.error(f"--steps must be above {WARMUP} and --repeats at least 1")
    if args.worker:
        measure(args.mixes[0], args.steps, args.repeats, args.size, args.worker)
        return 0
    from dflop_jax.cluster.launch import launch

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for mix in args.mixes:
            out = Path(folder) / "rows.json"
            command = ["python", __file__, "--steps", str(args.steps), "--size", args.size]
            command += ["--repeats", str(args.repeats), "--mixes", mix, "--worker", str(out)]
            code = launch(command, 2, devices_per_process=1, pin=True).exit_code
            if code:
                return code
            found[mix] = json.loads(out.read_text())
            if args.json:
                args.json.write_text(json.dumps(found, indent=1))
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

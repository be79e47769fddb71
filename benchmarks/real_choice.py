"""What `auto` chose, beside every policy, on two real processes and seven mixes of data.

Command:  python benchmarks/real_choice.py [--json FILE] [--repeats N] [--mixes NAME] [--policies P]
Minutes:  7 for a mix on a quiet Zen 5
Expected: `auto` is never behind the best measured policy by more than the spread of its repeats

Each process computes on a core of its own. On every mix the policies train the same model on the
same batches, by turns: all of them once, then all again. A repeat's time is its median step, its
idle share that of both cores; the first steps, in which a run times its tasks, do not count. What a
schedule says is without the host's work, which shares the cores here (benchmarks/simulator.py is
without it on both sides).
The mix "swinging" has small batches of clips and text, whose share of media differs from batch to
batch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from json_rows import add_json, shortened, write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.config import Policy

RUNS = Path("runs/real_choice")
WARMUP = 8  # steps left out of every median: those whose tasks are timed one by one
POLICIES: tuple[Policy, ...] = ("auto", "dflop", "orch", "dip")
BLIND: Policy = "blind"
MIXES = {  # share of each kind of scene
    "as usual": {"picture": 0.66, "pictures": 0.1, "clip": 0.12, "text": 0.12},
    "text": {"picture": 0.15, "pictures": 0.0, "clip": 0.05, "text": 0.8},
    "pictures": {"picture": 1.0, "pictures": 0.0, "clip": 0.0, "text": 0.0},
    "several pictures": {"picture": 0.1, "pictures": 0.8, "clip": 0.0, "text": 0.1},
    "clips": {"picture": 0.1, "pictures": 0.0, "clip": 0.8, "text": 0.1},
    "clips and text": {"picture": 0.0, "pictures": 0.0, "clip": 0.4, "text": 0.6},
    "swinging": {"picture": 0.0, "pictures": 0.0, "clip": 0.4, "text": 0.6},
}
SMALL_BATCHES = {"swinging": 16}  # samples of a step, instead of
BATCH = 64


def config(mix: str, policy: Policy, steps: int, size: str) -> Config:
    return Config(
        model=ModelConfig(size=size),
        data=DataConfig(n_samples=2048, seed=list(MIXES).index(mix)),  # profiles go by the seed
        plan=PlanConfig(
            policy=policy, max_model=1, max_stage=2, max_microbatches=16, effort="quick"
        ),
        train=TrainConfig(steps=steps, global_batch=SMALL_BATCHES.get(mix, BATCH)),
        checkpoint=CheckpointConfig(every_s=0),
        run_dir=str(RUNS / policy),
    )


# ---- in each of the two processes ----


def measure(
    mix: str, policies: Sequence[Policy], steps: int, repeats: int, size: str, out: Path
) -> None:
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
    rows: dict[str, dict] = {p: {"step_s": [], "idle": [], "simulated": []} for p in policies}
    plans: dict[Policy, Plan] = {}
    for _ in range(repeats):
        for policy in policies:
            run = config(mix, policy, steps, size)
            Trainer(run, plan=plans.get(policy), profile=profile, existing="overwrite").fit()
            plan = plans[policy] = load(Plan, Path(run.run_dir) / "plan.json")
            if place.peers.is_hub:
                row, run_steps = rows[policy], read_metrics(run.run_dir)[WARMUP:]
                row["plan"], row["predicted_s"] = plan.policy, plan.predicted.makespan_s
                row["step_s"].append(statistics.median(r["step_s"] for r in run_steps))
                row["idle"].append(statistics.median(idle_share(plan, r) for r in run_steps))
                row["simulated"] += [r["makespan_s"] / r["step_s"] for r in run_steps]
                print(f"{mix}, {policy}: {shortened(row)}", file=sys.stderr, flush=True)
                write_json(out, {mix: {p: r for p, r in rows.items() if r["step_s"]}})


def idle_share(plan, step: dict) -> float:
    """Of both cores' time in a step."""
    busy = sum(step["busy_fraction"][m.name] * m.n_devices for m in plan.submeshes)
    return 1 - busy / plan.n_devices


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

    columns = ("mix", "policy", "step ms (min - max)", "idle", "simulated over measured", "takes")
    table = Table(*columns, title="two processes, a core each")
    for mix, rows in found.items():
        for policy, r in rows.items():
            took = sorted(1e3 * s for s in r["step_s"])
            table.add_row(
                mix,
                policy,
                f"{statistics.median(took):.0f} ({took[0]:.0f} - {took[-1]:.0f})",
                f"{statistics.median(r['idle']):.0%}",
                f"{statistics.median(r['simulated']):.3f}",
                r["plan"],
            )
        table.add_section()
    console = Console(width=120)
    console.print(table)
    for mix, rows in found.items():
        if "auto" in rows:
            late, spread = (f"{x:.1%}" for x in behind(rows))
            console.print(f"{mix}: auto is {late} behind the best, its repeats spread {spread}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_json(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help=f"of a run; {WARMUP} warm up")
    parser.add_argument("--size", default="tiny+tiny-short", help="of the model")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--policies", nargs="+", choices=(*POLICIES, BLIND), default=POLICIES)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps <= WARMUP or args.repeats < 1:
        parser.error(f"--steps must be above {WARMUP} and --repeats at least 1")
    if args.worker:
        measure(args.mixes[0], args.policies, args.steps, args.repeats, args.size, args.worker)
        return 0
    from dflop_jax.cluster.launch import launch

    found: dict[str, dict[str, dict]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for mix in args.mixes:
            out = Path(folder) / "rows.json"
            command = ["python", __file__, "--steps", str(args.steps), "--size", args.size]
            command += ["--repeats", str(args.repeats), "--mixes", mix, "--worker", str(out)]
            command += ["--policies", *args.policies]
            code = launch(command, 2, devices_per_process=1, pin=True).exit_code
            found |= json.loads(out.read_text()) if out.exists() else {}
            write_json(args.json, found)
            if code:
                return code
            out.unlink()
    show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

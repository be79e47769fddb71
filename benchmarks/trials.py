"""Two processes pinned to a core each: whether trials choose the fastest plan, and what they cost.

Command:  python benchmarks/trials.py [--json FILE] [--steps N] [--mixes NAME ...] [--size NAME]
Minutes:  about 30 on 2 cores with nothing else running
Expected: the chosen plan takes at most 1.02 times the step of the best plan.

For each mix of data a run of `auto` tries its plans for 8 steps each and chooses. Then every plan
trains alone on the same batches, by turns: the plans that were tried, and the best plan of each
policy that was predicted to be too slow for a trial. The cost of trials is the time of the run from
its first step to the end of the last trial, less the chosen plan's median for each of these steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from json_rows import add_json, write_json
from rich.console import Console
from rich.table import Table

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.cli.launch import launch
from dflop_jax.data.datasets import scenes
from dflop_jax.records import Plan, Profile
from dflop_jax.records.files import load
from dflop_jax.report.row_file import read_rows
from dflop_jax.report.run_folder import CHECKPOINTS, PLAN, PROFILE, read_metrics
from dflop_jax.report.wall_time import EVENTS, EventRow
from dflop_jax.train import trainer
from dflop_jax.train.planning import make_plan
from dflop_jax.train.resume import read_state
from dflop_jax.train.run_context import make_run_context

RUNS = Path("runs/trials")
MIXES = {  # share of each group of scenes
    "pictures": {"picture": 1.0},
    "clips": {"clip": 1.0},
    "text": {"text": 0.9, "picture": 0.1},
    "swinging": {"clip": 0.5, "text": 0.5},  # batches differ most in their tokens of pictures
}
POLICIES = ("dflop", "orch", "dip")
TRIAL_STEPS, WARMUP, ROUNDS = 8, 2, 2
Row = dict[str, Any]


def config(mix: str, run: str, args: argparse.Namespace, **plan: Any) -> Config:
    return Config(
        model=ModelConfig(size=args.size),
        data=DataConfig(n_samples=4096),
        plan=PlanConfig(max_model=1, max_stage=2, max_microbatches=16, effort="quick", **plan),
        train=TrainConfig(steps=args.steps, global_batch=args.batch),
        checkpoint=CheckpointConfig(every_s=0 if "policy" in plan else 600.0),
        run_dir=str(RUNS / mix / run),
    )


def measure(mix: str, args: argparse.Namespace) -> Row:
    """Run the trials of a mix, then each plan alone; both processes do so together."""
    scenes.MIXTURE.clear()
    scenes.MIXTURE.update(MIXES[mix])
    n = 3 * TRIAL_STEPS + 1
    tried = config(mix, "auto", args, trials=TRIAL_STEPS)
    tried = replace(tried, train=replace(tried.train, steps=n))
    trainer.Trainer(tried, existing="overwrite").fit()
    folder = RUNS / mix / "auto"
    profile, chosen = load(Profile, folder / PROFILE), load(Plan, folder / PLAN)
    store = CheckpointStore(folder / CHECKPOINTS)
    trials = read_state(store.open(store.steps()[0]).run_state).trials
    plans = {t.plan.policy: t.plan for t in trials} or {chosen.policy: chosen}
    for policy in POLICIES:
        if policy not in plans:
            one = config(mix, policy, args, policy=policy)
            plans[policy] = make_plan(make_run_context(one), profile).plan
    step_s: dict[str, list[float]] = {policy: [] for policy in plans}
    for _ in range(ROUNDS):
        for policy, plan in plans.items():
            one = config(mix, policy, args, policy=policy)
            trainer.Trainer(one, plan=plan, profile=profile, existing="overwrite").fit()
            step_s[policy] += [r["step_s"] for r in read_metrics(one.run_dir)[WARMUP:]]
    medians = {policy: statistics.median(s) for policy, s in step_s.items()}
    return {
        "chosen": chosen.policy,
        "ratio": medians[chosen.policy] / min(medians.values()),
        "step_s": medians,
        "trials": [
            {name: getattr(t, name) for name in t.__dataclass_fields__} for t in chosen.trials
        ],
        "cost_s": cost_s(folder, medians[chosen.policy]),
    }


def cost_s(folder: Path, chosen_step_s: float) -> float:
    """Seconds that a run of trials spends beyond steps of the chosen plan, after its first step."""
    rows = list(read_rows(folder / EVENTS, EventRow, "an event", "run again"))
    at = {row.step: row.until_s for row in rows if row.step >= 0}
    first, last = min(at), max(at)
    return at[last] - at[first] - (last - first) * chosen_step_s


def main() -> int:
    args = arguments()
    if args.worker:
        rows: dict[str, Row] = {}
        for mix in args.mixes:
            rows[mix] = measure(mix, args)
            write_json(args.worker, {"mixes": rows})
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = args.json or Path(folder, "rows.json")
        command = ["python", __file__, "--worker", str(file), "--steps", str(args.steps)]
        command += ["--batch", str(args.batch), "--size", args.size, "--mixes", *args.mixes]
        code = launch(command, 2, devices_per_process=1, pin=True).exit_code
        if file.exists():
            show(json.loads(file.read_text())["mixes"])
    return code


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    parser.add_argument("--steps", type=int, default=20, help="steps of each plan, twice (20)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step (default 64)")
    parser.add_argument("--size", default="tiny", help="of the model; nano for a quick look")
    parser.add_argument(
        "--mixes", nargs="+", choices=MIXES, default=[*MIXES], help="only some of the mixes"
    )
    parser.add_argument("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARMUP:
        parser.error(f"--steps must be above {WARMUP}, which only warm up")
    return args


def show(rows: dict[str, Row]) -> None:
    names = ("mix", "chosen", "over the best", "step ms alone", "calibrated ms", "trials cost s")
    table = Table(*names, title="plans chosen by trials")
    for mix, r in rows.items():
        table.add_row(
            mix,
            r["chosen"],
            f"{r['ratio']:.3f}",
            ", ".join(f"{p} {1e3 * s:.0f}" for p, s in r["step_s"].items()),
            ", ".join(f"{t['policy']} {1e3 * t['calibrated_s']:.0f}" for t in r["trials"]),
            f"{r['cost_s']:.1f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())

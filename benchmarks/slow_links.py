"""Does a run plan by the links that it has? Two hosts of one process each, joined fast and slowly.

Command:  python benchmarks/slow_links.py [--json FILE] [--rate RATE] [--steps N] [--size NAME]
Minutes:  6 on 2 cores with nothing else running, as root
Expected: `auto` takes another placement over slow links than over fast ones, and on either links
          the plan that was made for them has the shorter measured step, as was planned

The hosts are virtual (`virtual_hosts.py`), with a link and a core each. Over each kind of links a
run plans and trains, then another trains by the plan of the other kind; all plans are predicted by
the times of their own programs and by links as they were measured.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table
from virtual_hosts import Hosts, missing, virtual_hosts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.cluster.secret import SECRET_ENV, new_secret
from dflop_jax.record_files import load
from dflop_jax.records import Plan
from dflop_jax.report.run_folder import PLAN, read_metrics
from dflop_jax.train.trying import plan_words

ROOT = Path(__file__).resolve().parent.parent
PORT = 47311
WARMUP = 4  # steps left out of every median
FAST = "fast"
EXPERIMENT = """
from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

def config():
    return Config(
        model=ModelConfig(size={size!r}),
        data=DataConfig(n_samples=2048),
        plan=PlanConfig(policy="auto", buckets=2, max_microbatches=8, max_model=1),
        train=TrainConfig(steps={steps}, global_batch=32),
        checkpoint=CheckpointConfig(every_s=0),
    )
"""


def train(hosts: Hosts, job: Path, run_dir: Path, cache: Path, flags: Sequence[str]) -> None:
    """Train with a process on each host; ends this program with what was said where one fails."""
    cores, secret = sorted(os.sched_getaffinity(0)), new_secret()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), SECRET_ENV: secret}
    jobs, logs = [], []
    for host, core in zip(hosts.hosts, cores, strict=False):
        command = ["taskset", "-c", str(core), sys.executable,
                   "-m", "dflop_jax.cli", "train", str(job), "--overwrite",
                   "--run_dir", str(run_dir), "--cache_dir", str(cache),
                   "--distributed.coordinator", f"{hosts.hosts[0].name}:{PORT}",
                   "--distributed.num_processes", "2",
                   "--distributed.process_id", str(host.index), *flags]  # fmt: skip
        logs.append(run_dir.with_suffix(f".{host.index}.log"))
        with logs[-1].open("wb") as log:
            whole = host.command(*command)
            jobs.append(subprocess.Popen(whole, stdout=log, stderr=log, env=environment))
    try:
        codes = [j.wait() for j in jobs]
    finally:
        for j in jobs:
            j.kill()
    if any(codes):
        said = [log.read_text(errors="replace").splitlines()[-5:] for log in logs]
        raise SystemExit("\n".join(sum(said, [f"exit codes {codes}"])))


def result(run_dir: Path, links: str, made_for: str) -> dict[str, object]:
    """A row: what was predicted of a plan, and what its steps took."""
    plan = load(Plan, run_dir / PLAN)
    steps = [r["step_s"] for r in read_metrics(run_dir)[WARMUP:]]
    quarters = statistics.quantiles(steps, n=4)
    return {
        "links": links,
        "plan_for": made_for,
        "plan": plan_words(plan),
        "predicted_s": plan.predicted.makespan_s,
        "measured_s": statistics.median(steps),
        "spread_s": [quarters[0], quarters[2]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_json(parser)
    parser.add_argument("--rate", default="100mbit", help="of the slow links, as tc says it")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--size", default="tiny", help="of the model")
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed")
    rates, rows = {FAST: None, args.rate: args.rate}, Rows(args.json, as_rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = folder / "job.py"
        job.write_text(EXPERIMENT.format(size=args.size, steps=args.steps))
        for other in (False, True):
            for links, rate in rates.items():
                made_for = next(k for k in rates if (k != links) is other)
                run_dir = folder / f"{links} by {made_for}"
                given = folder / f"{made_for} by {made_for}" / PLAN
                flags = ["--plan-file", str(given)] if other else []
                with virtual_hosts(2, rate) as hosts:
                    train(hosts, job, run_dir, folder / f"cache {links}", flags)
                rows.append(result(run_dir, links, made_for))
    table = Table("links", "plan for", "plan", "predicted ms", "measured ms")
    for r in sorted(rows, key=lambda r: (r["links"], r["plan_for"])):
        ms = (f"{1e3 * r[k]:.0f}" for k in ("predicted_s", "measured_s"))
        table.add_row(r["links"], r["plan_for"], r["plan"], *ms)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

"""Two processes pinned to a core each; one is slowed to half for a while: is it named?

Command:  python benchmarks/straggler.py [--json FILE] [--steps N] [--size NAME] [--policies P]
Minutes:  1.5 for 60 steps of each policy
Expected: where steps take twice as long its slowness is about 2; it is named once, 5 steps after it
          was slowed, and called no longer slow 5 steps after it runs freely again

Under `dflop` encoder and LLM have a process each, under `orch` both compute half of both and meet
in every exchange of features. The second's core is shared with two busy loops between the first
and the second third of the steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.config import Policy
from dflop_jax.report.run_folder import read_metrics

POLICIES: tuple[Policy, ...] = ("dflop", "orch")
ROOT = Path(__file__).resolve().parent.parent
SLOWED = 1  # the process whose core is shared
N_BUSY = 2  # loops on its core; its own threads, several at times, each get as much as a loop
BUSY = "import os\nos.sched_setaffinity(0, {%d})\nwhile True: pass"
EXPERIMENT = """
from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

def config():
    return Config(
        model=ModelConfig(size={size!r}),
        data=DataConfig(n_samples=2048),
        plan=PlanConfig(policy={policy!r}, max_model=1, max_stage=1, buckets=2, max_microbatches=8,
                        effort="quick", finalists=1),
        train=TrainConfig(steps={steps}, global_batch=32),
        checkpoint=CheckpointConfig(every=0),
        run_dir={run_dir!r},
    )
"""


def steps_done(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return len(read_metrics(run_dir, empty_ok=True)) if metrics.exists() else 0


def run(folder: Path, policy: Policy, steps: int, size: str) -> tuple[list[dict], list[str]]:
    """(rows of the metrics, what was logged about slow processes) of a run that is disturbed."""
    run_dir, core = folder / "run", sorted(os.sched_getaffinity(0))[SLOWED]
    fields = {"policy": policy, "size": size, "steps": steps, "run_dir": str(run_dir)}
    (folder / "job.py").write_text(EXPERIMENT.format(**fields))
    launch = [sys.executable, "-m", "dflop_jax.cli", "launch", "-n", "2", "--pin", "--"]
    busy: list[subprocess.Popen] = []
    with (folder / "log").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [*launch, "dflop", "train", str(folder / "job.py")]
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            while job.poll() is None:
                done = steps_done(run_dir)
                if not busy and steps // 3 <= done < 2 * steps // 3:
                    loop = [sys.executable, "-c", BUSY % core]
                    busy = [subprocess.Popen(loop) for _ in range(N_BUSY)]
                if done >= 2 * steps // 3:
                    for process in busy:
                        process.kill()
                time.sleep(0.05)
        finally:
            for process in (*busy, job):
                process.kill()
                process.wait()
    said = (folder / "log").read_text(errors="replace").splitlines()
    if job.returncode:
        raise SystemExit("\n".join(said[-5:]))
    return read_metrics(run_dir), [line for line in said if f"process {SLOWED} " in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_json(parser)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--size", default="tiny+tiny-short", help="of the model")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    args = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores are needed")
    third = args.steps // 3
    table = Table("policy", "steps", "median step ms", "slowness 0", "slowness 1 (at the end)")
    said: list[str] = []
    numbers = Rows(args.json, lambda rows: {"rows": rows, "log": said})
    for policy in args.policies:
        with tempfile.TemporaryDirectory() as folder:
            rows, lines = run(Path(folder), policy, args.steps, args.size)
        said += [f"{policy}: {line}" for line in lines]
        for begin, name in ((0, "free"), (third, "slowed"), (2 * third, "free again")):
            part = rows[begin + third // 4 : begin + third]
            step_ms = 1e3 * statistics.median(r["step_s"] for r in part)
            slowness = [part[-1]["slowness"].get(p, 0.0) for p in "01"]
            table.add_row(policy, name, f"{step_ms:.0f}", *(f"{s:.2f}" for s in slowness))
            row = {"policy": policy, "part": name, "step_ms": step_ms, "slowness": slowness}
            numbers.append(row)
        table.add_section()
    Console().print(table)
    print("\n".join(said))


if __name__ == "__main__":
    main()

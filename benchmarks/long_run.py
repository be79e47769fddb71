"""Memory and seconds of what is done with a run of a million steps and ten million samples.

Command:  python benchmarks/long_run.py [--steps N] [--samples N] [--folder DIR] [--json FILE]
Minutes:  5, and 1.5 GB of disk (in the folder of temporary files, unless --folder names another)
Expected: no row takes more than 200 MB over what the program takes to start

A run folder is made up: a row of metrics for every step, a sampled step in a hundred and an
evaluation in a thousand. A process of its own each then

  reads the run, as `dflop report RUN` does, page and picture included
  writes the summary that a run ends with
  resumes at the last step but 100: cuts the files of rows, reads the sampled steps
  takes all samples through the loader's `Replacements`, as a run of so many does
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from json_rows import Rows, add_json, write_json
from rich.console import Console
from rich.table import Table
from simulator_speed import make_plan

from dflop_jax.cli import main as dflop
from dflop_jax.data import Sample
from dflop_jax.data.decoder import Replacements
from dflop_jax.record_files import save
from dflop_jax.records import Load
from dflop_jax.report.evaluation_rows import EVALUATIONS
from dflop_jax.report.metrics import StepMetrics
from dflop_jax.report.run_folder import METRICS, PLAN, SAMPLES, RunFolder
from dflop_jax.report.summary import write_summary
from dflop_jax.schedule import learnt
from dflop_jax.train.evaluate import Evaluation
from dflop_jax.train.sample_file import SampleFile

SAMPLED, EVALUATED = 100, 1000  # one step in so many
RESUMED_AT = 100  # steps before the last
PRICES = "0123456789abcdef"


@dataclass(frozen=True)
class Row:
    """Seconds by the clock and of a core; `started_mb` is the memory before the work begins,
    `peak_mb` the most of the process."""

    what: str
    steps: int
    samples: int
    seconds: float
    cpu_s: float
    started_mb: float
    peak_mb: float


def make_folder(folder: Path, steps: int) -> None:
    """The records of a run of so many steps."""
    plan = make_plan(4, 14, 4)
    folder.mkdir(parents=True, exist_ok=True)
    save(plan, folder / PLAN)
    rng = np.random.default_rng(0)
    names, modules = [m.name for m in plan.layout.submeshes], plan.layout.modules
    encoder = msgspec.json.Encoder()
    with (folder / METRICS).open("wb") as file:
        for step in range(steps):
            loss, step_s, share = rng.random(3).tolist()
            row = StepMetrics(
                step=step,
                loss=loss + 5.0 / (1 + step / 100),
                supervised_tokens=100_000,
                step_s=1.0 + step_s,
                tokens_per_s=1e6,
                busy_fraction=dict.fromkeys(names, share),
                padding_fraction=dict.fromkeys(modules, share),
                groups={f"{m}:{k}x{4096}": k for m in modules for k in range(4)},
                makespan_s=1.0,
                lower_bound_s=0.9,
                correction={"sampling": 1.0, "farthest_factor": 1.1, "predicted_gain_s": 0.1,
                            "overhead_s": 0.01},
                losses={"llm": loss},
                model_flops_by_module=dict.fromkeys(modules, 1e15),
                flops_per_s_by_module=dict.fromkeys(modules, 1e15),
                mfu_by_module=dict.fromkeys(modules, 0.5),
                moved_in_node={"vision > llm": 1e9},
                moved_across_nodes={"vision > llm": 1e8},
                process_s={str(p): 1.0 + share for p in range(8)},
            )  # fmt: skip
            file.write(encoder.encode(row) + b"\n")
    programs = [f"{s.name}/{k}x4096/forward" for s in plan.layout.segments for k in range(4)]
    with (folder / SAMPLES).open("wb") as file:
        for step in range(0, steps, SAMPLED):
            ratios = dict.fromkeys(programs, 0.01)
            sample = learnt.StepSample(step, step + 5, PRICES, ratios, 0.1, 0.01)
            file.write(encoder.encode(sample) + b"\n")
    with (folder / EVALUATIONS).open("wb") as file:
        for step in range(EVALUATED, steps, EVALUATED):
            file.write(encoder.encode(Evaluation(step, 1.0, 0.5)) + b"\n")


def report(folder: Path, steps: int, samples: int) -> None:
    assert dflop(["report", str(folder)]) == 0


def summary(folder: Path, steps: int, samples: int) -> None:
    assert write_summary(folder).n_steps == steps


def resume(folder: Path, steps: int, samples: int) -> None:
    start = max(1, steps - RESUMED_AT)
    with RunFolder(folder, existing="resume") as run:
        run.restart(start)
        sampled = SampleFile(run.rows[SAMPLES])
        sampled.keep(lambda row: row.step < start)
        known = learnt.replay(learnt.Learnt(PRICES), sampled.read(), start)
        assert start - SAMPLED <= known.last < start


class Many:
    """A source of so many samples, of which nothing is asked."""

    name = "many"

    def __init__(self, n: int):
        self._n = n

    def __len__(self) -> int:
        return self._n

    def load(self, index: int) -> Load:
        return Load({})

    def sample(self, index: int) -> Sample:
        return Sample({}, {}, Load({}))

    def label(self, index: int) -> str:
        return str(index)


def seen(folder: Path, steps: int, samples: int) -> None:
    source = Many(samples)
    replaced, sample = Replacements(source, 0.1, 64), source.sample(0)
    for index in range(samples):
        replaced.usable(index // 64, index, sample, source.sample)


WORK: dict[str, Callable[[Path, int, int], None]] = {
    "report": report,
    "summary": summary,
    "resume": resume,
    "samples seen": seen,
}


def peak_mb() -> float:
    """The most memory that this process had (Linux counts in KB, macOS in bytes)."""
    per_mb = 1e6 if sys.platform == "darwin" else 1e6 / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / per_mb


def work(what: str, folder: Path, steps: int, samples: int) -> Row:
    """Do it, in this process."""
    started_mb, start_s, start_cpu_s = peak_mb(), time.perf_counter(), time.process_time()
    WORK[what](folder, steps, samples)
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return Row(what, steps, samples, seconds, cpu_s, started_mb, peak_mb())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000, help="default 1000000")
    parser.add_argument("--samples", type=int, default=10_000_000, help="default 10000000")
    parser.add_argument("--folder", type=Path, help="where the run folder is made")
    parser.add_argument("--only", choices=WORK, help=argparse.SUPPRESS)  # in a process of its own
    add_json(parser)
    args = parser.parse_args()
    if args.only:
        write_json(args.json, work(args.only, args.folder, args.steps, args.samples))
        return
    table = Table("what", "steps", "samples", "seconds", "CPU s", "MB at the start", "MB at most")
    rows = Rows(args.json)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder, answer = Path(temporary) / "run", Path(temporary) / "row.json"
        make_folder(folder, args.steps)
        sizes = ["--steps", str(args.steps), "--samples", str(args.samples)]
        for what in WORK:
            places = ["--folder", str(folder), "--json", str(answer)]
            command = [sys.executable, __file__, "--only", what, *sizes, *places]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            row = msgspec.json.decode(answer.read_bytes(), type=Row)
            rows.append(row)
            table.add_row(
                what,
                f"{row.steps:,}",
                f"{row.samples:,}",
                f"{row.seconds:.1f}",
                f"{row.cpu_s:.1f}",
                f"{row.started_mb:,.0f}",
                f"{row.peak_mb:,.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()

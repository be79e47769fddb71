"""What a training step takes of the host beside XLA's own computing, by part.

Command:  python benchmarks/host_work.py [--json FILE] [--like RUN] [--policy NAME] [--processes N]
Minutes:  about 4 on 2 cores for two processes of the size nano; less with --like
Expected: decoding and drawing most of it, then packing and dispatch

A run as any user's, by default of two processes that are pinned to a core each, with 256 samples a
step. What counts is processor time, not what the clock says: of every thread by its name, and in
the main thread by function. So other work on the machine adds noise, but no waiting. A row is one
part of one process, in milliseconds a step, over the steps that are counted:
  loads        what samples ask for, and which of a batch this process needs (dflop-select)
  decode       tokens and pixels of those (dflop-decode)
  pack         rows of groups, and what processes add up of a batch (dflop-prepare)
  transfer     host arrays to devices, and arrays between submeshes, in the main thread
  dispatch     the rest of calling a step's programs there
  bookkeeping  what is gathered, logged and learnt of finished steps there, and the watchers
  peers        messages between processes
  main         the rest of the main thread
  schedule     the process that solves schedules, its threads here with it (process 0)
`native` are threads that are not Python's: XLA's pool and transfers; it is not in `host`, the sum
of all other parts. Where XLA runs a small program in the thread that calls it, that is dispatch.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.cluster.launch import launch
from dflop_jax.pipeline import exchange, state, step, step_call, step_end
from dflop_jax.pipeline.executor import Executor
from dflop_jax.record_files import load
from dflop_jax.records import Plan, Profile
from dflop_jax.report.run_folder import PLAN, PROFILE
from dflop_jax.train import trainer
from dflop_jax.train.step_log import StepLog

WARMUP = 3  # steps before those that are counted
DRAIN = 3  # steps after them: batches are made ahead, so that theirs would be missing at the end
THREADS = {  # by how a thread's name begins
    "dflop-select": "loads",
    "dflop-decode": "decode",
    "dflop-prepare": "pack",
    "watcher": "bookkeeping",
    "peer": "peers",
    "MainThread": "main",
}
NATIVE, HOST, SCHEDULE = "native", "host", "schedule"
# Functions of the main thread by part, where they are called; what one calls of another part counts
# there.
FUNCTIONS = (
    ("transfer", exchange, "move"),
    ("transfer", state, "send"),
    ("transfer", step, "place"),
    ("transfer", step, "send"),
    ("transfer", step_call, "place"),
    ("transfer", step_end, "place"),
    ("transfer", step_end, "send"),
    ("dispatch", Executor, "run_step"),
    ("bookkeeping", StepLog, "finish"),
)


class MainThread:
    """Seconds of the main thread by part, from calls that may be nested."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner_s = 0.0  # of calls within the one that runs

    @contextmanager
    def measured(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part, owner, name in FUNCTIONS:
                stack.enter_context(patch.object(owner, name, self._timed(part, owner, name)))
            yield

    def _timed(self, part: str, owner: Any, name: str) -> Callable[..., Any]:
        call = getattr(owner, name)

        @functools.wraps(call)
        def timed(*args: Any, **more: Any) -> Any:
            outer_s, self._inner_s = self._inner_s, 0.0
            start_s = time.thread_time()
            try:
                return call(*args, **more)
            finally:
                took_s = time.thread_time() - start_s
                self.seconds[part] += took_s - self._inner_s
                self._inner_s = outer_s + took_s

        return timed


def thread_seconds() -> dict[str, float]:
    """Processor seconds of all threads so far by part, and of the children under "schedule"."""
    parts = {t.native_id: part_of(t.name) for t in threading.enumerate()}
    seconds: defaultdict[str, float] = defaultdict(float)
    for task in Path("/proc/self/task").iterdir():
        try:
            took_s = int((task / "schedstat").read_text().split()[0]) / 1e9
            children = (task / "children").read_text().split()
        except FileNotFoundError:  # it has ended
            continue
        seconds[parts.get(int(task.name), NATIVE)] += took_s
        for child in children:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            ticks = sum(map(int, fields[11:13]))  # user and system time
            seconds[SCHEDULE] += ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def part_of(name: str) -> str:
    """The part that a Python thread of a name works for."""
    return next((p for begin, p in THREADS.items() if name.startswith(begin)), SCHEDULE)


def train(config: Config, like: Path | None) -> tuple[int, dict[str, float]]:
    """(number of this process, milliseconds of a counted step by part)."""
    main = MainThread()
    seen: dict[int, tuple[dict[str, float], dict[str, float]]] = {}
    counted = range(WARMUP, config.train.steps - DRAIN)
    run_step = Executor.run_step

    def noted(ex: Executor, schedule: Any, *args: Any, **more: Any) -> Any:
        if schedule.step in (counted.start, counted.stop):
            seen[schedule.step] = thread_seconds(), dict(main.seconds)
        return run_step(ex, schedule, *args, **more)

    with patch.object(Executor, "run_step", noted), main.measured():
        given: dict[str, Any] = {}
        if like:
            given = {"plan": load(Plan, like / PLAN), "profile": load(Profile, like / PROFILE)}
        training = trainer.Trainer(config, existing="overwrite", **given)
        training.fit()
    threads, calls = map(_spent, seen[counted.start], seen[counted.stop])
    by_part = {**threads, **calls, "main": threads["main"] - sum(calls.values())}
    for part in threads.keys() & calls.keys():  # the watchers'
        by_part[part] = threads[part] + calls[part]
    by_part[HOST] = sum(s for part, s in by_part.items() if part != NATIVE)
    ms = {part: 1e3 * s / len(counted) for part, s in by_part.items()}
    return training.peers.process, ms


def _spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {part: s - before.get(part, 0.0) for part, s in after.items()}


def main() -> int:
    args = arguments()
    if args.worker:
        process, ms = train(configured(args), args.like)
        Path(f"{args.worker}.{process}").write_text(json.dumps(ms))
        return 0
    rows = Rows(args.json, as_rows)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row"
        command = ["python", __file__, *sys.argv[1:], "--worker", str(out)]
        code = launch(command, args.processes, devices_per_process=1, pin=True).exit_code
        for process in range(args.processes if not code else 0):
            for part, ms in sorted(json.loads(Path(f"{out}.{process}").read_text()).items()):
                rows.append({"process": process, "part": part, "cpu_ms_a_step": ms})
    Console().print(table(rows))
    return code


def table(rows: Rows) -> Table:
    processes = sorted({r["process"] for r in rows})
    shown = Table("part", *(f"process {p}: ms" for p in processes), title="processor time a step")
    of = {(r["part"], r["process"]): r["cpu_ms_a_step"] for r in rows}
    for part in sorted({r["part"] for r in rows}, key=lambda p: -of.get((p, 0), 0.0)):
        shown.add_row(part, *(f"{of.get((part, p), 0.0):.1f}" for p in processes))
    return shown


def configured(args: argparse.Namespace) -> Config:
    config = Config(
        model=ModelConfig(size=args.size),
        data=DataConfig(n_samples=8192),
        plan=PlanConfig(policy=args.policy, max_model=1, max_stage=2, max_microbatches=16),
        train=TrainConfig(steps=args.steps, global_batch=args.batch),
        checkpoint=CheckpointConfig(every_s=0),
        run_dir=str(args.run),
    )
    return replace(config, model=ModelConfig(factory=args.factory)) if args.factory else config


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_json(parser)
    parser.add_argument("--like", metavar="RUN", type=Path, help="a run folder with plan, profile")
    parser.add_argument("--policy", default="dflop", help="that plans (default dflop)")
    parser.add_argument("--processes", type=int, default=2, help="a core each (default 2)")
    parser.add_argument("--steps", type=int, default=16, help="of the run (default 16)")
    parser.add_argument("--batch", type=int, default=256, help="samples of a step (default 256)")
    parser.add_argument("--size", default="nano", help="of the model (default nano)")
    parser.add_argument("--factory", default="", help="of another model, MODULE:FUNCTION")
    parser.add_argument("--run", type=Path, default=Path("runs/host_work"), help="its folder")
    parser.add_argument("--worker", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARMUP + DRAIN:
        parser.error(f"--steps must be above {WARMUP + DRAIN}, which are not counted")
    return args


if __name__ == "__main__":
    sys.exit(main())

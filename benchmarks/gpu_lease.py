"""Everything that a lent GPU is asked, in three calls.

Command:  python benchmarks/gpu_lease.py OUT [--part 1|2|3] [--seconds N]
          python benchmarks/gpu_lease.py OUT --compile-only [h100|h200]   without a GPU
          python benchmarks/gpu_lease.py OUT --tiny                       toy sizes, on any device
Minutes:  5, 4 and what is left of 15 on one H100 or H200; --compile-only about 25 on 2 cores;
          --tiny about 4
Needs:    jax[cuda13] or jax[cuda12] and what the product needs, a GPU of 80 GB; --compile-only: the
          extra gpu-compile
Expected: no growth of memory over 3 standard errors; programs within 15% of predicted_ms; runs
          within 15% of the planned step and below the planned bytes, no compile after the first
          step; a resumed run with the losses of the whole one

OUT/rows.jsonl gets a line per result as it is found; OUT/log.txt what was said. Lines that OUT has
are not measured again, so a call that was ended goes on. Run --compile-only first and carry OUT
along: it leaves the plan and the profile of part 3 there, so that no time goes to profiling.

Part 1: forty steps of four layers of LLaVA-OneVision-0.5B at full width; memory is read while
nothing is in flight, every 5th step. Each variant is a process of its own. Part 2: programs alone,
timed in turns (`ms` is a median, `ms_p10` and `ms_p90` its spread). `predicted_ms` follows from a
program's HLO and the roofline of plans. Part 3: whole runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from json_rows import shortened
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.aot.chips import compiler_environment, find_chip
from dflop_jax.distributed.devices import is_xla_flag, set_xla_environment, uses_cpu

SECONDS = {1: 300.0, 2: 250.0, 3: 300.0}  # that each part may take
TINY_SECONDS = 900.0
MARGIN_S = 8.0  # left to a task to end after its deadline
BASE, AWAITED, PROGRAMS = "base", "every task awaited", "programs"
NO_PARTITIONING = "xla_gpu_enable_allocator_spatial_partitioning"
COMMAND_BUFFER = "xla_gpu_enable_command_buffer"
ADAPTERS = "llava-ov-7b-adapters"
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What one process measures.

    Attributes:
      flag: the XLA flag that it sets, with its value; "": none.
      needs_s: seconds that its part must have left.
      compiles: whether `--compile-only` has something to do.
    """

    part: int
    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    flag: str = ""
    needs_s: float = 0.0
    compiles: bool = False


TASKS = (
    Task(1, BASE, compiles=True),
    Task(1, "no spatial partitioning", flag=f"{NO_PARTITIONING}=false"),
    Task(1, "cuda_async allocator", {"XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async"}),
    Task(1, "no command buffers", flag=f"{COMMAND_BUFFER}="),
    Task(1, AWAITED),
    Task(2, PROGRAMS, compiles=True),
    Task(3, "llava-ov-0.5b", compiles=True),
    Task(3, ADAPTERS, needs_s=200.0, compiles=True),
    Task(3, "exact"),
)


# ---- in a process of its own ----


def measure_task(task: Task, args: argparse.Namespace, known: frozenset[str]) -> Iterator[Row]:
    """Lines of a task, on the device that jax finds or the chip of `--compile-only`."""
    import gpu_run

    if task.part == 3 and args.compile_only:
        yield from gpu_run.plan_run(task.name, args.out, args.compile_only, tiny=args.tiny)
        return
    if not args.compile_only:
        set_xla_environment()
    if task.part == 3:
        runs = partial(gpu_run.train_run, task.name, args.out, tiny=args.tiny)
        yield from gpu_run.exact_run() if task.name == gpu_run.EXACT else runs()
        return

    import gpu_engine
    import jax
    from gpu_cases import Bench, Deadline, hardware_of

    from dflop_jax.aot.chips import absent_devices
    from dflop_jax.hardware import find_hardware

    if args.compile_only:
        hardware = find_hardware(args.compile_only)
        bench = Bench(absent_devices(hardware, 1)[0], hardware, False, known=known)
    else:
        device = jax.devices()[0]
        bench = Bench(device, hardware_of(device), True, 3 if args.tiny else 12, known)
    yield {"name": f"device {task.name}", "kind": bench.device.device_kind, "jax": jax.__version__}
    sizes = gpu_engine.TINY if args.tiny else gpu_engine.FULL
    deadline = Deadline(args.seconds if bench.runs else float("inf"))
    if task.part == 2:
        yield from gpu_engine.programs(bench, sizes, deadline)
    elif bench.runs:
        awaits = task.name == AWAITED
        yield from gpu_engine.leak_probe(bench, sizes, deadline, task.name, awaits=awaits)
    else:
        ex = gpu_engine.probe_executor(bench, sizes)
        yield from gpu_engine.program_lines(bench, ex.programs, {})
        ex.close()


# ---- the processes, one after another ----


def as_json(row: Row) -> str:
    return msgspec.json.encode(row).decode()


class Lease:
    """The rows of OUT, and the tasks that add some."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._file = args, args.out / "rows.jsonl"
        self.mode = f"{args.compile_only or 'device'}{' tiny' * args.tiny}"
        lines = self._file.read_text().splitlines(keepends=True) if self._file.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        self.rows: list[Row] = [msgspec.json.decode(line) for line in whole]
        if whole != lines:  # the last one was being written
            self._file.write_text("".join(whole))

    def add(self, task: Task, row: Row) -> None:
        row = {"mode": self.mode, "part": task.part, "task": task.name, **row}
        self.rows.append(row)
        print(shortened(row), flush=True)
        with self._file.open("a") as file:
            file.write(as_json(row) + "\n")

    def of_task(self, task: Task) -> list[Row]:
        here = (self.mode, task.part, task.name)
        return [r for r in self.rows if (r["mode"], r["part"], r["task"]) == here]

    def run(self, task: Task, seconds: float) -> bool:
        """Run a task that is not done; return whether it failed."""
        found = self.of_task(task)
        if any(r["name"] == "end" for r in found):
            return False
        if seconds < max(task.needs_s * (not self._args.tiny), 1.0):
            self.add(task, {"name": "left out", "error": f"{seconds:.0f} s are left"})
            return task.needs_s == 0.0
        if task.flag and not is_xla_flag(task.flag.partition("=")[0]):
            self.add(task, {"name": "end", "skipped": f"this jax has no --{task.flag}"})
            return False
        start_s, n_before = time.monotonic(), len(found)
        code = self._run_process(task, seconds)
        new = self.of_task(task)[n_before:]
        if code:
            self.add(task, {"name": "failed", "error": f"exit code {code}, see log.txt"})
        if code or any("error" in r for r in new):
            return True
        self.add(task, {"name": "end", "seconds": time.monotonic() - start_s})
        return False

    def _run_process(self, task: Task, seconds: float) -> int:
        args = self._args
        words = [sys.executable, __file__, args.out, "--child", TASKS.index(task)]
        words += ["--tiny"] if args.tiny else []
        if args.compile_only:
            words += ["--compile-only", args.compile_only]
        else:
            words += ["--seconds", max(1.0, seconds - MARGIN_S)]
        uses_compiler = args.compile_only and task.part < 3
        environment = {**(compiler_environment() if uses_compiler else os.environ)}
        paths = (str(Path(__file__).resolve().parent.parent), environment.get("PYTHONPATH"))
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), **task.environment}
        if task.flag:
            flags = environment.get("XLA_FLAGS", ""), f"--{task.flag}"
            environment["XLA_FLAGS"] = " ".join(flags).strip()
        with (args.out / "log.txt").open("a") as log:
            process = subprocess.Popen(
                [*map(str, words)], env=environment, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
            limit = threading.Timer(seconds, partial(os.killpg, process.pid, signal.SIGKILL))
            if not args.compile_only:
                limit.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("{"):
                        self.add(task, msgspec.json.decode(line))
                return process.wait()
            finally:
                limit.cancel()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


# ---- what was found ----


def summary(rows: Sequence[Row]) -> Iterator[Table]:
    """Tables of growth by variant, of programs and of runs. Of a name, what was compiled for a chip
    and what was measured are joined."""
    joined: dict[tuple[int, str], Row] = {}
    for r in sorted(rows, key=lambda r: str(r["mode"]).startswith("device")):
        if "error" not in r and r["name"] != "end":
            joined[r["part"], r["name"]] = joined.get((r["part"], r["name"]), {}) | r
    yield _table(
        "Part 1: live bytes per step, MiB", ("slope", "error", "of arrays", "peak GiB", "ms"),
        {n: (_mib(r["slope"]), _mib(r["slope_error"]), _mib(r["arrays_slope"]), _peak(r),
             _number(r["ms"])) for (p, n), r in joined.items() if p == 1 and "slope" in r},
    )  # fmt: skip
    yield _table(
        "Parts 1 and 2: programs", ("price ms", "ms", "price/ms", "MFU", "MFU by price", "GiB"),
        {n: (_number(r.get("predicted_ms")), _number(r.get("ms")), _over(r, "predicted_ms", "ms"),
             _percent(r.get("of_peak")), _percent(r.get("predicted_mfu")), _gib(r["peak_bytes"]))
         for (p, n), r in joined.items() if p < 3 and "compile_s" in r and "slope" not in r},
    )  # fmt: skip
    yield _table(
        "Part 3: runs", ("planned s", "s", "planned/s", "MFU", "MFU planned", "planned GiB",
                         "compiled GiB", "peak GiB", "slope MiB", "compiles", "to step 1 s"),
        {n: (_number(r["planned_s"]), _number(r.get("measured_s")),
             _over(r, "planned_s", "measured_s"), _percent(r.get("mfu")),
             _percent(r.get("predicted_mfu")), _gib(r["planned_bytes"]),
             _gib(r.get("compiled_bytes")), _peak(r), _mib(r.get("slope")),
             str(r.get("compiles", "-")), _number(r.get("start_s")))
         for (p, n), r in joined.items() if p == 3 and "planned_s" in r},
    )  # fmt: skip


def _table(title: str, columns: Sequence[str], cells: Mapping[str, Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for name, values in cells.items():
        table.add_row(name, *values)
    return table


def _number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None or value != value else f"{value / scale:.4g}"


def _percent(value: float | None) -> str:
    return "-" if not value else f"{value:.1%}"


_mib, _gib = partial(_number, scale=2.0**20), partial(_number, scale=2.0**30)


def _over(row: Row, upper: str, lower: str) -> str:
    return f"{row[upper] / row[lower]:.2f}" if row.get(upper) and row.get(lower) else "-"


def _peak(row: Row) -> str:
    """The peak and, where known, its ratio to what the compiler says."""
    peak, bound = row.get("peak_bytes"), row.get("peak_bytes_upper_bound")
    ratio = f" ({peak / row['compiled_bytes']:.2f}x)" if peak and "compiled_bytes" in row else ""
    return f"{_gib(peak)}{ratio}" if peak else f"<= {_gib(bound)}" if bound else "-"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of rows.jsonl and log.txt")
    parser.add_argument("--part", type=int, choices=SECONDS, help="only this part")
    parser.add_argument("--seconds", type=float, help="that a part may take (300, 250, 300)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on any device")
    parser.add_argument("--compile-only", nargs="?", const="h100", metavar="CHIP",
                        help="compile and plan it for a chip that is not here (h100)")  # fmt: skip
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        if args.compile_only:
            find_chip(args.compile_only)
            compiler_environment()
    except ValueError as e:
        parser.error(str(e))
    if uses_cpu() and not (args.tiny or args.compile_only):
        parser.error("jax sees no GPU, and times of a CPU say nothing of one; give --tiny or "
                     "--compile-only, or install jax[cuda12] or jax[cuda13]")  # fmt: skip
    return args


def main() -> int:
    args = parsed()
    if args.child is not None:
        rows = Lease(args)
        task = TASKS[args.child]
        known = frozenset(r["name"] for r in rows.of_task(task) if "error" not in r)
        for row in measure_task(task, args, known):
            print(as_json(row), flush=True)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the child, too
    lease, failed = Lease(args), 0
    for part in SECONDS if args.part is None else (args.part,):
        end_s = time.monotonic() + (args.seconds or (TINY_SECONDS if args.tiny else SECONDS[part]))
        for task in (t for t in TASKS if t.part == part and (t.compiles or not args.compile_only)):
            left_s = float("inf") if args.compile_only else end_s - time.monotonic()
            failed += lease.run(task, left_s)
    console = Console(width=None if sys.stdout.isatty() else 160)
    for table in summary(lease.rows):
        if table.row_count:
            console.print(table)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

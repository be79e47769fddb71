"""Whole runs on one GPU: what they were planned to take, and what they took.

Command:  python benchmarks/gpu_run.py [--json FILE] [--only NAME ...] [--steps N] [--folder DIR]
          python benchmarks/gpu_run.py --tiny                        toy sizes, on any device
Minutes:  5 to 10 a model on one H100, most of it compiling; --tiny about 4 a model on 2 cores
Needs:    jax[cuda13] or jax[cuda12] and what the product needs, a GPU of 80 GB
Expected: steps within 15% of the planned, memory within 5% of the planned and never above, the same
          at every step; no compile after the first step; of `exact` a stopped and resumed run has
          the losses of the whole one bit for bit, and a CPU has them to 1e-4

Each row is a process that trains with random weights on the built-in scenes as `dflop train` does:
it profiles, plans, times the plan's programs and trains, in bfloat16 with float32 masters.
`planned_s` is what plan.json says of a step, `measured_s` the mean of the steps after the third,
whose batches differ in size; `over_schedule` is the median of a step over its own schedule.
`grows` are bytes that the device holds more after a step than after the one before, and of these
what jax knows arrays of.
`exact` is a nano model in float32, on the GPU and on its host's CPU. With --folder each row's run,
what it says (log.txt) and its cache stay, so that one that was ended begins where compiling was.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from json_rows import Rows, add_json
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dflop_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    ModelConfig,
    PlanConfig,
    TrainConfig,
)
from dflop_jax.records import Plan, Profile
from dflop_jax.records.files import load
from dflop_jax.report.run_folder import PLAN, PROFILE, read_metrics, read_plan
from dflop_jax.report.wall_time import read_wall_time

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
WARM = 3  # steps that are not counted
EXACT_STEPS, STOP_AFTER = 8, 4
CHILD = "--child"
ARRAYS = "arrays.json"  # bytes of the arrays that jax knows after each step
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A model, its toy size, the rank of its adapters (0: all of it trains) and longest samples."""

    factory: str
    size: str
    tiny: str
    lora_rank: int = 0
    max_tokens: int = 4096


CASES = {
    "llava-ov-0.5b": Case("models.llava:build", "llava-ov-0.5b", "nano"),
    "qwen3-vl-2b": Case("models.qwen3_vl:build", "qwen3-vl-2b", "qwen3-vl-nano"),
    "qwen3.5-4b, adapters": Case("models.qwen3_5:build", "qwen3.5-4b", "qwen3.5-nano", 16),
    "gemma3-4b, adapters": Case("models.gemma:build", "gemma3-4b", "gemma3-nano", 16),
}
EXACT = "exact"


def config(case: Case, steps: int, run: Path, *, tiny: bool) -> Config:
    dtype: Any = "float32" if tiny else "bfloat16"
    data = DataConfig(
        n_samples=512, max_tiles=9, max_frames=16, min_pixels=262_144,
        max_tokens=case.max_tokens, workers=8,
    )  # fmt: skip
    if tiny:
        data = replace(data, max_tiles=4, max_frames=4, min_pixels=1024, max_tokens=192, workers=1)
    return Config(
        model=ModelConfig(case.factory, case.tiny if tiny else case.size, dtype=dtype),
        data=data,
        plan=PlanConfig(devices=1, buckets=2, effort="quick"),
        train=TrainConfig(
            steps=steps, global_batch=8 if tiny else 32, learning_rate=1e-4, warmup_steps=2,
            lora_rank=case.lora_rank,
        ),
        checkpoint=CheckpointConfig(every_s=0),
        run_dir=str(run),
        cache_dir=str(run.parent / "cache"),
    )  # fmt: skip


def exact_config(run: Path) -> Config:
    tiny = config(CASES["llava-ov-0.5b"], EXACT_STEPS, run, tiny=True)
    return replace(tiny, checkpoint=CheckpointConfig(every=EXACT_STEPS))


# ---- in a process of its own ----


def train(settings: Config, stop_after: int, like: str, *, resume: bool) -> None:
    """One run, under the plan of another where there is one; stopped after so many steps, where
    that is not 0, as a user's code would."""
    import jax

    from dflop_jax import Callback, Trainer

    known: list[int] = []

    class Stop(Callback):
        def after_step(self, done: Any) -> None:
            known.append(sum(a.nbytes for a in jax.live_arrays()))
            if done.step + 1 == stop_after:
                self.stop("as asked")

    given: dict[str, Any] = {}
    if like:
        given["plan"] = load(Plan, Path(like) / PLAN)
        given["profile"] = load(Profile, Path(like) / PROFILE)
    existing: Literal["resume", "overwrite"] = "resume" if resume else "overwrite"
    Trainer(settings, existing=existing, callbacks=[Stop()], **given).fit()
    (Path(settings.run_dir) / ARRAYS).write_text(json.dumps(known))


def child(arguments: Sequence[str]) -> None:
    name, steps, run, tiny, stop_after, resume, like = arguments
    settings = (
        exact_config(Path(run))
        if name == EXACT
        else config(CASES[name], int(steps), Path(run), tiny=tiny == "tiny")
    )
    train(settings, int(stop_after), like, resume=resume == "resume")


def trained(
    name: str, steps: int, run: Path, tiny: bool, stop_after: int = 0, *, resume: bool = False,
    like: Path | str = "", on_cpu: bool = False,
) -> float:  # fmt: skip
    """Run a child, which says what it does in a log beside its run; its seconds.

    Raises:
      RuntimeError: it failed; the message has the end of what it said.
    """
    how = "tiny" if tiny else "full", stop_after, "resume" if resume else "new"
    words = [name, steps, run, *how, like]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path} | ({"JAX_PLATFORMS": "cpu"} if on_cpu else {})
    begun_s = time.perf_counter()
    with (run.parent / "log.txt").open("a+") as log:
        done = subprocess.run(
            [sys.executable, __file__, CHILD, *map(str, words)],
            env=environment, stdout=log, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        log.seek(0)
        if done.returncode:
            raise RuntimeError(" ".join(log.read()[-1500:].split()))
    return time.perf_counter() - begun_s


# ---- rows ----


def run_row(name: str, steps: int, folder: Path, *, tiny: bool) -> Row:
    run = folder / "run"
    seconds = trained(name, steps, run, tiny)
    plan, rows, spent = read_plan(run), read_metrics(run), read_wall_time(run)
    assert spent is not None
    measured_s = mean(r["step_s"] for r in rows[WARM:])
    held = [(r["memory_bytes"] or {}).get("device", 0) for r in rows]
    peak = max((r["memory_bytes"] or {}).get("device_peak", 0) for r in rows)
    arrays = json.loads((run / ARRAYS).read_text())
    planned_peak = max(plan.predicted.peak_bytes.values())
    return {
        "name": name, "policy": plan.policy, "buckets": [b.name for b in plan.layout.buckets],
        "planned_s": plan.predicted.makespan_s, "chosen_by_s": plan.predicted.chosen_by_s,
        "measured_s": measured_s, "measured_over_planned": measured_s / plan.predicted.makespan_s,
        "over_schedule": median(r["step_s"] / r["makespan_s"] for r in rows[WARM:]),
        "steps_s": [r["step_s"] for r in rows],
        "phase_s": rows[-1]["phase_s"],
        "tokens_per_s": median(r["tokens_per_s"] for r in rows[WARM:]),
        "mfu": median(r["mfu"] or 0 for r in rows[WARM:]),
        "mfu_by_module": rows[-1]["mfu_by_module"],
        "padding": rows[-1]["padding_fraction"],
        "planned_gib": planned_peak / GIB, "peak_gib": peak / GIB,
        "grows": {"device": _growth(held), "arrays": _growth(arrays)},
        "compiles": sum(r["compiles"] for r in rows[1:]),
        "losses": [r["loss"] for r in rows],
        "seconds": seconds, "spent_s": spent.seconds,
    }  # fmt: skip


def _growth(held: Sequence[float]) -> float:
    """Of a step, without the last one, behind which there is none."""
    return (held[-2] - held[0]) / max(len(held) - 2, 1)


def exact_row(folder: Path) -> Row:
    whole, parts, cpu = (folder / name for name in ("whole", "parts", "cpu"))
    seconds = trained(EXACT, EXACT_STEPS, whole, True)
    trained(EXACT, EXACT_STEPS, parts, True, STOP_AFTER, like=whole)
    at_stop = len(read_metrics(parts))
    trained(EXACT, EXACT_STEPS, parts, True, resume=True)
    trained(EXACT, EXACT_STEPS, cpu, True, like=whole, on_cpu=True)
    losses = [[r["loss"] for r in read_metrics(run)] for run in (whole, parts, cpu)]
    on_device, resumed, on_cpu = losses
    return {
        "name": EXACT, "stopped_after": at_stop, "resumed_equal": resumed == on_device,
        "worst_off_cpu": max(abs(a - b) / abs(b) for a, b in zip(on_device, on_cpu, strict=True)),
        "losses": on_device, "seconds": seconds,
    }  # fmt: skip


def show(rows: Sequence[Row]) -> Table:
    table = Table("run", "policy", "planned s", "measured s", "ratio", "tokens/s", "MFU",
                  "planned GiB", "peak GiB", "compiles", "seconds to step 1")  # fmt: skip
    for r in rows:
        if "planned_s" in r:
            before = r["seconds"] - sum(r["steps_s"])
            table.add_row(
                r["name"], r["policy"], f"{r['planned_s']:.3f}", f"{r['measured_s']:.3f}",
                f"{r['measured_over_planned']:.3f}", f"{r['tokens_per_s']:,.0f}", f"{r['mfu']:.1%}",
                f"{r['planned_gib']:.1f}", f"{r['peak_gib']:.1f}", str(r["compiles"]),
                f"{before:.0f}",
            )  # fmt: skip
    return table


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_json(parser)
    parser.add_argument("--only", nargs="+", choices=(*CASES, EXACT), default=(*CASES, EXACT))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, on any device")
    parser.add_argument("--folder", type=Path, help="keep runs, logs and caches here")
    args = parser.parse_args()
    if args.steps <= WARM:
        parser.error(f"--steps {args.steps} leaves none to measure; give more than {WARM}")
    rows = Rows(args.json)
    for name in args.only:
        folder = args.folder / name if args.folder else Path(tempfile.mkdtemp(prefix="gpu_run-"))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            rows.append(
                exact_row(folder)
                if name == EXACT
                else run_row(name, args.steps, folder, tiny=args.tiny)
            )
        except RuntimeError as e:
            rows.append({"name": name, "error": str(e)})
        finally:
            if not args.folder:
                shutil.rmtree(folder, ignore_errors=True)
    Console(width=None if sys.stdout.isatty() else 160).print(show(rows))
    return 1 if any("error" in r for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

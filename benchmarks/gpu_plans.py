"""Plans that the planner chooses for GPUs that are not here, every program of them compiled.

Command:  python benchmarks/gpu_plans.py [--json FILE] [--cases NAME ...] [--max-model N]
Minutes:  4 for VLM-S with --max-model 2; more for each tensor degree and for larger models
Needs:    the extra gpu-compile
Expected: every program compiles, the plan fits, and its peak bytes are within 5% of the compiled

DIP's smaller models (experiments/paper) under their own policy, and LLaVA-OneVision, fully
fine-tuned on the embedded samples: the 7B on a node without tensor parallelism, the 72B on eight
nodes. All at full width and depth in bfloat16. Prices and bytes that the planner goes by come from
a few layers compiled for the chip; then every program of the plan that it chooses is compiled, as
by `dflop compile`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from rich.console import Console
from rich.table import Table

from dflop_jax.cli.terminal import ticker
from dflop_jax.config import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.gpu_compile.child import CompileJob
from dflop_jax.gpu_compile.chip_profile import predicted_profile
from dflop_jax.gpu_compile.compiling import compile_plan
from dflop_jax.records import Load
from dflop_jax.train.planning import make_plan
from dflop_jax.train.prepare import set_up
from experiments.paper.answers import parallelism
from experiments.paper.cases import Case
from experiments.paper.dip_models import CASES

GIB = 2**30
SMALL = {c.name: c for c in CASES if c.name in ("VLM-S", "T2V-S")}
SAMPLES = 1024
WITHIN = 0.05
# Model size, chip, devices, global batch, most tensor parallelism.
LLAVA = {
    "7B, 8 H100": ("llava-ov-7b", "h100", 8, 64, 1),
    "7B, 8 A100": ("llava-ov-7b", "a100-80", 8, 64, 1),
    "72B, 64 H100": ("llava-ov-72b", "h100", 64, 256, 8),
}
NAMES = (*SMALL, *LLAVA)


def sequences(config: DataConfig, model: Any, split: str) -> Lengths:
    """Sequences of the case that `config.path` names."""
    return Lengths(SMALL[config.path])


class Lengths:
    """A source of which only the lengths of samples are known: enough to plan by."""

    def __init__(self, case: Case) -> None:
        self.name, self._loads = case.name, case.loads(SAMPLES, 0)

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, index: int) -> Load:
        return self._loads[index]

    def label(self, index: int) -> str:
        return f"{self.name}[{index}]"


def config(name: str, max_model: int) -> Config:
    """What to plan for; `max_model`: most tensor parallelism of DIP's models."""
    searched = PlanConfig(effort="quick", buckets=4, max_stage=8, max_microbatches=64)
    if name in LLAVA:
        size, chip, devices, batch, tensor = LLAVA[name]
        return Config(
            model=ModelConfig(size=size, dtype="bfloat16"),
            data=DataConfig(max_tokens=8192),
            plan=replace(searched, hardware=chip, devices=devices, max_model=tensor),
            train=TrainConfig(global_batch=batch),
            cache_dir="runs/cache",
        )
    case = SMALL[name]
    chip, devices = case.hardware.name, case.n_devices
    return Config(
        model=ModelConfig(factory="experiments.paper.compiled:build", size=name, dtype="bfloat16"),
        data=DataConfig(factory="benchmarks.gpu_plans:sequences", path=name),
        plan=replace(searched, policy="dip", hardware=chip, devices=devices, max_model=max_model),
        train=TrainConfig(global_batch=case.global_batch),
        cache_dir="runs/cache",
    )


@dataclass(frozen=True)
class Row:
    case: str
    submesh: str
    planned_bytes: float
    compiled_bytes: float

    @property
    def off(self) -> float:
        return self.planned_bytes / self.compiled_bytes - 1


def measure(name: str, max_model: int) -> tuple[list[Row], dict[str, Any]]:
    """Planned and compiled bytes of every submesh, and facts about the plan."""
    chosen = config(name, max_model)
    place = set_up(chosen)
    start_s = time.perf_counter()
    profile = predicted_profile(place, place.source(), ticker("predicting prices"))
    profiled_s = time.perf_counter() - start_s
    plan = make_plan(place, profile, ticker("planning")).plan
    report = compile_plan(CompileJob(chosen, plan), ticker("compiling"))
    rows = [Row(name, m.submesh, m.planned_bytes, m.peak_bytes) for m in report.memory]
    failed = [f"{p.name}: {p.error}" for p in report.programs if p.error]
    told = {
        "plan": f"{plan.policy}: {parallelism(plan)}",
        "chunks": len(plan.layout.segments),
        "step_s": plan.predicted.makespan_s,
        "programs": len(report.programs),
        "compiled": sum(not p.same_as for p in report.programs),
        "compile_s": sum(p.compile_s for p in report.programs),
        "profiled_s": profiled_s,
        "verdict": report.verdict,
        "fits": report.fits,
        "failed": failed,
    }
    return rows, told


def main(argv: Sequence[str] | None = None) -> int:
    # Here: the process that compiles imports this file as one of a package.
    from json_rows import add_json, write_json

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_json(parser)
    parser.add_argument("--cases", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument(
        "--max-model", type=int, default=8, help="most tensor parallelism of DIP's models"
    )
    args = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    rows: list[Row] = []
    plans: dict[str, dict[str, Any]] = {}
    for name in args.cases:
        try:
            found, plans[name] = measure(name, args.max_model)
        except ValueError as e:
            parser.error(f"{name}: {e}")
        rows += found
        print(name, *(f"{k}: {v}" for k, v in plans[name].items()), sep="\n  ", flush=True)
        write_json(args.json, {"rows": rows, "plans": plans})
    table = Table("case", "submesh", "planned GiB", "compiled GiB", "off")
    for r in rows:
        gib = (f"{n / GIB:.1f}" for n in (r.planned_bytes, r.compiled_bytes))
        table.add_row(r.case, r.submesh, *gib, f"{r.off:+.1%}")
    Console().print(table)
    off = [abs(r.off) for r in rows]
    print(f"peak bytes: off by {statistics.median(off):.1%} (median), {max(off):.1%} (worst)")
    good = all(p["fits"] and not p["failed"] for p in plans.values())
    return 0 if good and max(off) <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())

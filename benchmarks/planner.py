"""How long planning takes, from one node to a thousand GPUs, and whether its answer is the best.

Command:  python benchmarks/planner.py [--json FILE] [--full]
Minutes:  about 8 on 2 cores with nothing else running (more with --full)
Expected: `auto` in 8, 16 and 25 s of a core for 8, 64 and 1,024 devices with plan.effort quick
          (2026-11-30, EPYC; more on a VM without AVX-512)

LLaVA-OneVision with Qwen2.5-7B on A100-80s from the roofline, policies auto, dflop and dip, tensor
parallelism and pipelines up to 8, up to 64 microbatches, the built-in samples. Profiling is not
part of the time; it depends on the model only. `gain` is the uniform baseline's step over the
planned one, both simulated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from json_rows import Rows, add_json

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.config import Effort, Policy
from dflop_jax.train import planning, run_context
from dflop_jax.train.profiling import make_profile

POLICIES: tuple[Policy, ...] = ("auto", "dflop", "dip")
SIZES = ((8, 128), (16, 128), (64, 512), (256, 1024), (1024, 4096))  # devices, global batch


@dataclass(frozen=True)
class Row:
    policy: Policy
    devices: int
    batch: int
    placements: int
    candidates: int
    simulated: int
    seconds: float  # of a core
    step_s: float
    gain: float
    plan: str
    effort: Effort

    def place(self) -> tuple[bool, int, int]:
        """Rows are shown policy by policy."""
        return self.effort == "full", POLICIES.index(self.policy), self.devices


def config(devices: int, batch: int, policy: Policy, effort: Effort) -> Config:
    return Config(
        model=ModelConfig(size="llava-ov-7b", dtype="bfloat16"),
        data=DataConfig(n_samples=4096, max_tokens=8192),
        plan=PlanConfig(
            hardware="a100-80",
            devices=devices,
            policy=policy,
            max_model=8,
            max_stage=8,
            max_microbatches=64,
            effort=effort,
        ),
        train=TrainConfig(global_batch=batch),
    )


def measure(policies: Sequence[Policy], effort: Effort, repeats: int) -> Iterator[Row]:
    """Rows of every size and policy; the baseline is planned once a size."""
    first = run_context.make_run_context(config(8, 128, "dflop", effort))
    profile = make_profile(first, first.source())
    for devices, batch in SIZES:
        at = replace(profile, model=replace(profile.model, concurrency=float(devices)))
        blind = planning.make_plan(
            run_context.make_run_context(config(devices, batch, "blind", effort)), at
        )
        for policy in policies:
            place = run_context.make_run_context(config(devices, batch, policy, effort))
            spans = []
            for _ in range(repeats):
                start_s = time.process_time()
                found = planning.make_plan(place, at)
                spans.append(time.process_time() - start_s)
            step_s = found.plan.predicted.makespan_s
            yield Row(
                policy,
                devices,
                batch,
                found.n_placements,
                found.n_candidates,
                found.n_evaluated,
                statistics.median(spans),
                step_s,
                blind.plan.predicted.makespan_s / step_s,
                found.candidates[0].name,
                effort,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser)
    parser.add_argument("--full", action="store_true", help="plan.effort full as well")
    parser.add_argument("--repeats", type=int, default=3, help="searches timed (default 3)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    rows = Rows(args.json, lambda rows: sorted(rows, key=Row.place))
    efforts: tuple[Effort, ...] = ("quick", "full") if args.full else ("quick",)
    for effort in efforts:
        for row in measure(POLICIES, effort, args.repeats):
            rows.append(row)
    for effort in efforts:
        show(effort, sorted((r for r in rows if r.effort == effort), key=Row.place))
    return 0


def show(effort: str, rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = "policy, devices, batch, placements, candidates, simulated, seconds, step ms, gain"
    table = Table(*names.split(", "), "best placement", title=f"planning, effort {effort}")
    for r in rows:
        table.add_row(
            r.policy,
            str(r.devices),
            str(r.batch),
            str(r.placements),
            str(r.candidates),
            str(r.simulated),
            f"{r.seconds:.2f}",
            f"{1e3 * r.step_s:.0f}",
            f"{r.gain:.2f}x",
            r.plan,
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())

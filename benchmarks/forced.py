"""What plans may ask for, run for real: processes that meet in every way, beside a plain run.

Command:  python benchmarks/forced.py [--json FILE] [--rows NAME ...] [--steps N]
Minutes:  8 on 2 cores with nothing else running
Expected: the losses of every row are those of the plain run of the same samples, to 1e-4 of them

Rows, each of processes with a device of their own, and a core where there are enough:
  loop       the LLM in two stages over two processes, its groups of four microbatches
  zero2-tp2  both modules on two data ranks of two tensor ranks each, gradients shared (ZeRO 2)
  zero3-tp2  the same, parameters shared too (ZeRO 3)
  tensor     the LLM on two tensor ranks, a process each
  memory     memory for less than the fastest plan takes: the planner has to save some
  generator  policy dip with a generator of clips behind the LLM
  redecide   a run under a plan of orch for samples of another kind, which changes plans

A plain run has one process and one device. `does` says what a row's plan has to show.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from json_rows import Rows, add_json, as_rows
from rich.console import Console
from rich.table import Table

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.cluster.launch import launch
from dflop_jax.config import Policy
from dflop_jax.contract import edges_of
from dflop_jax.record_files import load
from dflop_jax.records import (
    Bucket,
    DataProfile,
    Layout,
    Load,
    MeshShape,
    Plan,
    Profile,
    SegmentPlan,
    Shape,
    Zero,
)
from dflop_jax.report.run_folder import PLAN, PROFILE, read_metrics
from dflop_jax.train.prepare import build_model
from dflop_jax.train.redecide import Redecider
from dflop_jax.train.trainer import Trainer

Mesh = tuple[int, MeshShape]  # its first device, and its shape
ALIKE = 1e-4  # share of a loss that may differ: each plan adds up in another order
MEMORY_SHARE = 0.8  # of what the fastest plan takes, in the row `memory`
GENERATOR = ModelConfig(factory="models.wan:build", size="tiny-short+wan-tiny")
WORDS = Path(__file__).resolve().parent.parent / "experiments" / "t2v_words.json"


@dataclass(frozen=True)
class Row:
    """How a row runs: on how many processes, by which plan (None: the planner's), and what its plan
    has to show."""

    processes: int
    does: Callable[[Plan], bool]
    vision: Mesh = (0, MeshShape())
    llm: Mesh = (0, MeshShape())
    zero: Zero = 1
    group_size: int = 1
    policy: Policy | None = None

    def layout(self) -> Layout:
        """A layout of LLaVA that is given by hand; its shapes hold every sample."""
        model = build_model(ModelConfig(size="nano"))
        named = {"vision": self.vision, "llm": self.llm}
        submeshes = {mesh: mesh[1].block(name, mesh[0]) for name, mesh in named.items()}
        segments = (
            SegmentPlan(
                m, m, 0, model.modules[m].n_layers, submeshes[mesh].name, True, True, zero=self.zero
            )
            for m, mesh in named.items()
        )
        shapes = {"vision": Shape(34, model.piece_tokens["vision"]), "llm": Shape(1, 352)}
        return Layout(
            tuple(submeshes.values()), tuple(segments), (Bucket.of(shapes),),
            tuple(edges_of(model)), self.group_size,
            tied=tuple(m for m in named if model.modules[m].tied),
        )  # fmt: skip


def _stages(plan: Plan) -> bool:
    return any(m.stage == 2 for m in plan.layout.submeshes) and plan.layout.group_size == 4


def _shares(zero: Zero) -> Callable[[Plan], bool]:
    return lambda plan: all(s.zero == zero for s in plan.layout.segments) and _tensor(plan)


def _tensor(plan: Plan) -> bool:
    return any(m.model == 2 for m in plan.layout.submeshes)


def _saves(plan: Plan) -> bool:
    return any(s.remat != "none" or s.remat_less for s in plan.layout.segments)


def _generates(plan: Plan) -> bool:
    return plan.policy == "dip" and "generator" in plan.layout.modules


BOTH = (0, MeshShape(data=2, model=2))
ROWS = {
    "loop": Row(2, _stages, llm=(0, MeshShape(stage=2)), group_size=4),
    "zero2-tp2": Row(4, _shares(2), BOTH, BOTH, zero=2),
    "zero3-tp2": Row(4, _shares(3), BOTH, BOTH, zero=3),
    "tensor": Row(2, _tensor, llm=(0, MeshShape(model=2))),
    "memory": Row(2, _saves, policy="dflop"),
    "generator": Row(2, _generates, policy="dip"),
    "redecide": Row(2, lambda plan: plan.policy != "orch", policy="auto"),
}


def config_of(name: str, folder: Path, steps: int) -> Config:
    """What a row and its plain run have in common."""
    generator, changes, row = name == "generator", name == "redecide", ROWS[name]
    return Config(
        model=GENERATOR if generator else ModelConfig(size="nano"),
        data=DataConfig(n_samples=512, tokenizer=str(WORDS) if generator else ""),
        plan=PlanConfig(
            buckets=2,
            max_model=max(row.vision[1].model, row.llm[1].model),
            max_microbatches=8,
            effort="quick",
            finalists=1,
        ),
        train=TrainConfig(steps=steps, global_batch=16),
        checkpoint=CheckpointConfig(every=4 if changes else 0),
        cache_dir=str(folder / "cache"),
    )


def work(name: str, folder: Path, steps: int, *, plain: bool) -> None:
    """One process of a row's run, or of its plain one."""
    config, row = config_of(name, folder, steps), ROWS[name]
    run_dir = folder / f"{name}{' plain' * plain}"
    config = replace(config, run_dir=str(run_dir))
    if plain:
        config = replace(config, plan=replace(config.plan, devices=1, policy="orch"))
        Trainer(config).fit()
        return
    if row.policy:
        config = replace(config, plan=replace(config.plan, policy=row.policy))
    if name == "memory":
        config = replace(config, plan=replace(config.plan, memory_bytes=_too_little(config)))
    if name == "redecide":
        _change_plans(config)
        return
    Trainer(config, plan=None if row.policy else Plan(name, row.layout())).fit()


def _too_little(config: Config) -> float:
    """Bytes that do not hold what the planner takes where it may take all."""
    free = replace(config, train=replace(config.train, steps=1), run_dir=f"{config.run_dir} free")
    Trainer(free, existing="overwrite").fit()
    predicted = load(Plan, Path(free.run_dir) / PLAN).predicted
    return MEMORY_SHARE * max(predicted.peak_bytes.values())


def _change_plans(config: Config) -> None:
    """Train by orch's plan, made from a profile of samples without pictures, with steps that seem
    to take so long that any gain pays."""
    short = replace(
        config,
        plan=replace(config.plan, policy="orch"),
        train=replace(config.train, steps=1),
        run_dir=f"{config.run_dir} orch",
    )
    Trainer(short, existing="overwrite").fit()
    plan = load(Plan, Path(short.run_dir) / PLAN)
    profile = load(Profile, Path(short.run_dir) / PROFILE)
    texts = tuple(Load({"llm": (n,)}) for n in (20, 30))
    data = DataProfile(profile.data.source, len(texts), texts, profile.data.loads)
    look = Redecider.look

    def slow(self: Redecider, done: int, step_s: Sequence[float]) -> object:
        return look(self, done, [1e5] * len(step_s))

    Redecider.look = slow  # type: ignore[assignment, method-assign]
    config = replace(config, plan=replace(config.plan, policy="dflop", redecide_every=4))
    Trainer(config, plan=plan, profile=replace(profile, data=data)).fit()


def measured(name: str, folder: Path, steps: int) -> dict[str, object]:
    """A row: how far its losses are from those of the plain run."""
    command = [sys.executable, __file__, "--worker", name, str(folder), "--steps", str(steps)]
    subprocess.run([*command, "--plain"], check=True)
    n = ROWS[name].processes
    has_cores = n <= len(os.sched_getaffinity(0))  # else they share them
    code = launch(command, n, devices_per_process=1, pin=has_cores).exit_code
    if code:
        raise SystemExit(f"{name}: ended with exit code {code}")
    got, want = (
        np.array([r["loss"] for r in read_metrics(folder / run)]) for run in (name, f"{name} plain")
    )
    plan = load(Plan, folder / name / PLAN)
    return {
        "row": name,
        "processes": n,
        "plan": f"{plan.policy}: " + ", ".join(f"{m.name} {m.text}" for m in plan.layout.submeshes),
        "does": ROWS[name].does(plan),
        "steps": len(got),
        "losses": got.tolist(),
        "most_apart": float(np.max(np.abs(got - want) / want)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_json(parser)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, folder = args.worker
        work(name, Path(folder), args.steps, plain=args.plain)
        return 0
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows = Rows(args.json, as_rows)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.rows:
            rows.append(measured(name, Path(folder), args.steps))
    table = Table("row", "processes", "plan", "steps", "losses apart, at most", "as asked")
    bad = []
    for r in rows:
        is_good = r["does"] and r["most_apart"] <= ALIKE
        table.add_row(r["row"], str(r["processes"]), r["plan"], str(r["steps"]),
                      f"{r['most_apart']:.1e}", "yes" if r["does"] else "no")  # fmt: skip
        bad += [] if is_good else [r["row"]]
    Console(width=140).print(table)
    if bad:
        print(f"not as they should be: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

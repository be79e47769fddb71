"""The same training under four policies, on a laptop without GPU.

Command:  python experiments/demo.py      (or `make demo`)
Minutes:  about 3 on 2 cores
Expected: one table; the data-aware policies pad less and take less time per step than `blind`, at
          equal loss; a line says which of them `auto` takes, and why.

All runs train the same tiny LLaVA on the built-in scenes, from the same initial parameters and on
the same batches. Where there are two cores, on two processes with a core each, so that step times
are wall time; elsewhere on 8 pretended devices of one process. `dflop train experiments/demo.py`
runs one of them so.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig
from dflop_jax.config import Policy

if TYPE_CHECKING:
    from dflop_jax import Trainer

RUNS: tuple[Policy, ...] = ("blind", "dflop", "dip", "orch")
AUTO = Path("runs/demo/auto")  # the plan that `auto` makes
# Figures that fit into 80 columns; `dflop report` has all.
SHOWN = (
    "speed-up",
    "step time, median",
    "tokens / s",
    "padding",
    "imbalance",
    "idle",
    "loss, first",
)


def config(policy: Policy = "dflop") -> Config:
    return Config(
        model=ModelConfig(size="tiny+tiny-short"),
        data=DataConfig(n_samples=4096),
        # Compiling and timing more of them would take as long as the training itself.
        plan=PlanConfig(
            policy=policy,
            devices=8,
            buckets=2,
            effort="quick",
            max_model=1,
            max_microbatches=8,
        ),
        train=TrainConfig(steps=12, global_batch=64, warmup_steps=3),
        run_dir=f"runs/demo/{policy}",
    )


def train(two_processes: bool) -> None:
    from dflop_jax import Trainer  # the import takes seconds that the launching process saves

    profile = None  # measured by the first run; all have the same model and devices
    for name in RUNS:
        run = config(name)
        if two_processes:
            # By itself, such a short run would plan with less effort, which costs 10% of a step.
            plan = replace(run.plan, devices=2, max_microbatches=16, effort="full")
            run = replace(run, plan=plan)
        trainer = Trainer(run, profile=profile, existing="overwrite")
        trainer.fit()
        profile = trainer.profile
    if trainer.peers.is_primary:
        keep_auto(trainer)
    trainer.peers.barrier("auto")


def keep_auto(trainer: Trainer) -> None:
    """Keep the plan that `auto` makes of a trainer's profile."""
    from dflop_jax.records.files import save
    from dflop_jax.report.run_folder import PLAN
    from dflop_jax.train.planning import make_plan

    assert trainer.profile is not None  # it has trained
    run = replace(trainer.config, plan=replace(trainer.config.plan, policy="auto"))
    plan = make_plan(replace(trainer.context, config=run), trainer.profile).plan
    AUTO.mkdir(parents=True, exist_ok=True)
    save(plan, AUTO / PLAN)


def choice(folders: list[Path]) -> str:
    """Return which policy `auto` chooses, and the step time that the profile predicts for each."""
    from dflop_jax.report.run_folder import read_plan

    plans = [plan for f in folders if (plan := read_plan(f)).policy != "blind"]
    expected = ", ".join(f"{p.policy} {1e3 * p.predicted.chosen_by_s:,.0f} ms" for p in plans)
    return (
        f"auto chooses {read_plan(AUTO).policy}; step times predicted from the profile: {expected}"
    )


def main() -> int:
    from rich.console import Console

    from dflop_jax.cli.launch import launch
    from dflop_jax.report.compare import compare
    from dflop_jax.report.reader import read_runs

    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= 2:
        command = ["python", __file__, "--process"]
        if code := launch(command, 2, devices_per_process=1, pin=True).exit_code:
            return code
    else:
        train(two_processes=False)
    console = Console()
    folders = [Path(config(name).run_dir) for name in RUNS]
    picture = Path("runs/demo/compare.png")
    console.print(compare(read_runs(folders), picture, SHOWN))
    console.print(choice(folders))
    console.print(f"timelines of all under one time axis: {picture}")
    console.print(f"all figures: dflop report {' '.join(map(str, folders))}")
    console.print(f"each run's summary.md, timeline.png and trace.json: {folders[0].parent}/")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--process"]:
        train(two_processes=True)
    else:
        sys.exit(main())

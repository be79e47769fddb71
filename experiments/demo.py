"""The data-aware plan against the blind one, on a laptop without GPU.

Command:  python experiments/demo.py      (or `make demo`)
Minutes:  under 5 on 2 cores
Expected: one table; `dflop` pads less and takes less time per step than `blind`, at equal loss.

Both runs train the same tiny LLaVA on the embedded scenes, from the same initial parameters and on
the same batches. Where there are two cores, on two processes with a core each, so that step times
are wall time; `dflop` then takes the planner's choice (policy auto). Elsewhere on 8 pretended
devices of one process. `dflop train experiments/demo.py` runs one of them so.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

RUNS = ("blind", "dflop")


def config(policy: str = "dflop") -> Config:
    return Config(
        model=ModelConfig(size="tiny+tiny-short"),
        data=DataConfig(n_samples=4096),
        # Compiling and timing more of them would take as long as the training itself.
        plan=PlanConfig(
            policy=policy,
            devices=8,
            buckets=3,
            max_model=1,
            max_microbatches=8,
            finalists=1,
        ),
        train=TrainConfig(steps=20, global_batch=64, warmup_steps=5),
        run_dir=f"runs/demo/{policy}",
    )


def train(two_processes: bool) -> None:
    from dflop_jax import Trainer

    for name in RUNS:
        run = config(name)
        if two_processes:
            policy = "auto" if name == "dflop" else name
            run = replace(
                run, plan=replace(run.plan, policy=policy, devices=2, max_microbatches=16)
            )
        Trainer(run, existing="overwrite").fit()


def main() -> int:
    from rich.console import Console

    from dflop_jax.cluster.launch import launch
    from dflop_jax.report.compare import compare

    if hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) >= 2:
        command = ["python", __file__, "--process"]
        if code := launch(command, 2, devices_per_process=1, pin=True).exit_code:
            return code
    else:
        train(two_processes=False)
    console = Console()
    folders = [Path(config(name).run_dir) for name in RUNS]
    picture = Path("runs/demo/compare.png")
    console.print(compare(folders, picture))
    console.print(f"timelines of both under one time axis: {picture}")
    console.print(f"each run's summary.md, timeline.png and trace.json: {folders[0].parent}/")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--process"]:
        train(two_processes=True)
    else:
        sys.exit(main())

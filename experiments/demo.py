"""The data-aware plan against the blind one, on a laptop without GPU.

Command:  python experiments/demo.py      (or `make demo`)
Minutes:  under 5 on 2 cores
Expected: one table; the data-aware run pads less and takes less time per step, at equal loss.

Both runs train the same tiny LLaVA on the embedded scenes, from the same initial parameters and on
the same batches: on two processes with a core each, so that the speed-up is wall time, or on 8
pretended devices of one process where there is one core only. `dflop train experiments/demo.py`
runs the data-aware one on pretended devices.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig

RUNS = Path("runs/demo")


def config(name: str = "dflop", devices: int = 8) -> Config:
    return Config(
        model=ModelConfig(size="tiny"),
        data=DataConfig(n_samples=4096),
        plan=PlanConfig(
            policy="blind" if name == "blind" else "auto",
            devices=devices,
            max_model=1,
            max_microbatches=8,
        ),
        train=TrainConfig(steps=24, global_batch=64, warmup_steps=5),
        checkpoint=CheckpointConfig(every=0),
        run_dir=str(RUNS / name),
    )


def train(devices: int) -> None:
    from dflop_jax import Trainer

    for name in ("blind", "dflop"):
        Trainer(config(name, devices), existing="overwrite").fit()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def main() -> int:
    from rich.console import Console

    from dflop_jax.report.compare import compare
    from dflop_jax.train.launch import launch

    if "--processes" in sys.argv:  # one of the two that this script starts
        train(devices=2)
        return 0
    if cores() > 1:
        command = ["python", __file__, "--processes"]
        code = launch(command, 2, devices_per_process=1, pin=True).exit_code
        if code:
            return code
    else:
        train(devices=8)
    console, picture = Console(), RUNS / "compare.png"
    console.print(compare([RUNS / "blind", RUNS / "dflop"], picture))
    console.print(f"timelines of both under one time axis: {picture}")
    console.print(f"each run's summary.md, timeline.png and trace.json: {RUNS}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())

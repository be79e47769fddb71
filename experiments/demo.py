"""The data-aware plan against the blind one, on a laptop without GPU.

Command:  python experiments/demo.py      (or `make demo`)
Minutes:  under 5 on 2 cores
Expected: one table; `dflop` pads less and takes less time per step than `blind`, at equal loss.

Both runs train the same tiny LLaVA on the embedded scenes on 8 pretended CPU devices, from the same
initial parameters and on the same batches. `dflop train experiments/demo.py` runs one of them.
"""

from __future__ import annotations

from pathlib import Path

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config(policy: str = "dflop") -> Config:
    return Config(
        model=ModelConfig(size="tiny"),
        data=DataConfig(n_samples=4096),
        plan=PlanConfig(policy=policy, devices=8, max_model=1, max_microbatches=8),
        train=TrainConfig(steps=24, global_batch=64, warmup_steps=5),
        run_dir=f"runs/demo/{policy}",
    )


def main() -> None:
    from rich.console import Console

    from dflop_jax import Trainer
    from dflop_jax.report.compare import compare

    console = Console()
    folders = []
    for policy in ("blind", "dflop"):
        console.rule(f"{policy}")
        run = config(policy)
        folders.append(Path(run.run_dir))
        Trainer(run, existing="overwrite").fit()
    picture = Path("runs/demo/compare.png")
    console.print(compare(folders, picture))
    console.print(f"timelines of both under one time axis: {picture}")
    console.print(f"each run's summary.md, timeline.png and trace.json: {folders[0].parent}/")


if __name__ == "__main__":
    main()

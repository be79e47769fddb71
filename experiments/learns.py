"""Does it learn to see? The same run with pictures and with every picture blanked.

Command:  python experiments/learns.py
Minutes:  under 10 on 2 cores
Expected: the held-out answer loss with pictures is clearly below the one without

Both runs are equal but for `data.blank_images`: same questions, same loads, same schedule,
same initial parameters. What the blanked run reaches is what the words of the questions give away.
"""

from __future__ import annotations

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config(blank: bool = False) -> Config:
    return Config(
        model=ModelConfig(size="tiny"),
        data=DataConfig(n_samples=16384, blank_images=blank, max_frames=8, max_tiles=4),
        plan=PlanConfig(devices=2, max_model=1, max_microbatches=4),
        train=TrainConfig(
            steps=300, global_batch=32, warmup_steps=20, learning_rate=1e-3, eval_samples=512
        ),
        run_dir="runs/learns/" + ("blanked" if blank else "pictures"),
    )


def main() -> None:
    from rich.console import Console
    from rich.table import Table

    from dflop_jax import Trainer

    table = Table("run", "held-out answer loss", "token accuracy")
    losses = []
    for blank in (False, True):
        run = config(blank)
        result = Trainer(run, existing="overwrite").fit()
        held_out = result.evaluation
        assert held_out is not None
        losses.append(held_out.loss)
        name = "pictures blanked" if blank else "with pictures"
        table.add_row(name, f"{held_out.loss:.4f}", f"{held_out.accuracy:.3f}")
    console = Console()
    console.print(table)
    console.print(f"seeing lowers the held-out answer loss to {losses[0] / losses[1]:.0%}")


if __name__ == "__main__":
    main()

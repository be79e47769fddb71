"""Two stages by two commands: first the connector alone, then all parts at lower rates.

Command:  dflop train experiments/two_stages.py
          dflop train experiments/two_stages.py --init-from runs/two_stages/connector \
            --train.stage full --train.steps 60 --train.learning_rate 5e-4 \
            --train.learning_rates vision=1e-4 --run_dir runs/two_stages/all
Minutes:  12.5 on 2 cores that other work kept busy (load 3 to 18), nothing cached; not timed alone
Expected: two runs, each planned for what trains in it; the second one begins about where the first
          one ended (losses 6.4 to 5.8, 5.7 to 0.6)
"""

from __future__ import annotations

import sys

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config() -> Config:
    return Config(
        model=ModelConfig(size="tiny"),
        data=DataConfig(n_samples=1024, max_frames=4, max_tiles=2),
        plan=PlanConfig(
            policy="dflop",
            devices=2,
            max_model=1,
            max_microbatches=4,
            buckets=2,
            effort="quick",
        ),
        train=TrainConfig(steps=30, global_batch=16, warmup_steps=5, stage="connector"),
        checkpoint=CheckpointConfig(every=10, keep=2),
        run_dir="runs/two_stages/connector",
    )


if __name__ == "__main__":
    from dflop_jax.cli import main

    sys.exit(main(["train", __file__, *sys.argv[1:]]))

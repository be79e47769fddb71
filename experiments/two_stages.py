"""Two stages in one command: first the connector alone, then all parts at lower rates.

Command:  dflop train experiments/two_stages.py
Minutes:  12.5 on 2 cores that other work kept busy (load 3 to 18), nothing cached; not timed alone
Expected: two runs, in runs/two_stages/1-connector and 2-all, each planned for what trains in it;
          the second one begins about where the first one ended (losses 6.4 to 5.8, 5.7 to 0.6)

Killed at any step, `--resume auto` goes on there. `--only all` and any other command
(`dflop plan experiments/two_stages.py --only all`) are for one of them.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config() -> dict[str, Config]:
    connector = Config(
        model=ModelConfig(size="tiny"),
        data=DataConfig(n_samples=1024, max_frames=4, max_tiles=2),
        plan=PlanConfig(
            policy="dflop",
            devices=2,
            max_model=1,
            max_microbatches=4,
            buckets=2,
            effort="quick",
            finalists=1,
        ),
        train=TrainConfig(steps=30, global_batch=16, warmup_steps=5, stage="connector"),
        checkpoint=CheckpointConfig(every=10, keep=2),
        run_dir="runs/two_stages",
    )
    everything = replace(
        connector.train, steps=60, stage="full", learning_rate=5e-4, learning_rates=("vision=1e-4",)
    )
    return {"connector": connector, "all": replace(connector, train=everything)}


if __name__ == "__main__":
    from dflop_jax.cli import main

    sys.exit(main(["train", __file__, *sys.argv[1:]]))

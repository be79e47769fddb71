"""Trains on photographs, documents, clips, sound and text, mixed in every batch.

Command:  dflop train experiments/omni.py --data.path DIR_OR_JSON_OR_YAML
Minutes:  about 4 on 2 cores for a folder of 150 samples
Expected: the loss falls; summary.md shows the padding of tiles, windows of sound and tokens

Records have `image` (a path or a list), `video`, `audio` or none of them, and `conversations`;
a .yaml mixes several datasets (see dflop_jax/data/datasets/mixture.py). The small model hears
windows of two seconds, sixteen of a sound.
"""

from __future__ import annotations

import sys

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config() -> Config:
    return Config(
        model=ModelConfig(factory="models.omni:build", size="omni-tiny"),
        data=DataConfig(path="data", max_tiles=6, max_frames=16, max_tokens=1024),
        plan=PlanConfig(devices=4, max_model=1, max_microbatches=8),
        train=TrainConfig(
            steps=20, global_batch=16, warmup_steps=5, eval_samples=14, eval_every=10
        ),
        run_dir="runs/omni",
    )


if __name__ == "__main__":
    from dflop_jax.cli import main

    sys.exit(main(["train", __file__, *sys.argv[1:]]))

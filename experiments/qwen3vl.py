"""Qwen3-VL at native resolution: pictures of many sizes and clips, each costing its own patches.

Command:  dflop train experiments/qwen3vl.py
Minutes:  about 5 on 2 cores shared with other work, most of it compiling
Expected: the loss falls from 6.5 to about 2; no compile after warm-up; summary.md shows the padding
          of both modules

A published folder needs no experiment: dflop train --model HF_FOLDER --data DIR_OR_JSON_OR_YAML
takes its limits of pixels and frames from there. The small model here trains on the built-in
scenes, whose pictures have 16 to 324 patches of 8 x 8 pixels.
"""

from __future__ import annotations

import sys

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config() -> Config:
    return Config(
        model=ModelConfig(factory="models.qwen3_vl:build", size="qwen3-vl-tiny"),
        data=DataConfig(
            n_samples=1024, min_pixels=1024, max_tiles=9, max_frames=16, max_tokens=256
        ),
        plan=PlanConfig(devices=2, buckets=2, max_model=1, max_microbatches=4, effort="quick"),
        train=TrainConfig(steps=20, global_batch=16, warmup_steps=5),
        run_dir="runs/qwen3vl",
    )


if __name__ == "__main__":
    from dflop_jax.cli import main

    sys.exit(main(["train", __file__, *sys.argv[1:]]))

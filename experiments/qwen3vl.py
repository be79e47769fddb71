"""Qwen3-VL at native resolution: pictures of many sizes and clips, each costing its own patches.

Command:  dflop train experiments/qwen3vl.py
          dflop train experiments/qwen3vl.py --model.size HF_FOLDER --model.weights HF_FOLDER \
            --data.tokenizer HF_FOLDER --data.path DIR_OR_JSON_OR_YAML --data.min_pixels 65536 \
            --data.max_frames 768 --data.max_tokens 8192
Minutes:  about 5 on 2 cores shared with other work, most of it compiling
Expected: the loss falls from 6.5 to about 2; no compile after warm-up; summary.md shows the padding
          of both modules

65,536 pixels at least and 768 frames at most are the published processor's, whose other limits are
the defaults. The small model reads patches of 8 x 8 pixels of the embedded scenes, from 16 to 324 a
picture.
"""

from __future__ import annotations

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config() -> Config:
    return Config(
        model=ModelConfig(factory="models.qwen3_vl:build", size="qwen3-vl-tiny"),
        data=DataConfig(
            n_samples=1024, min_pixels=1024, max_tiles=9, max_frames=16, max_tokens=256
        ),
        plan=PlanConfig(
            devices=2, buckets=2, max_model=1, max_microbatches=4, effort="quick", finalists=1
        ),
        train=TrainConfig(steps=20, global_batch=16, warmup_steps=5),
        run_dir="runs/qwen3vl",
    )

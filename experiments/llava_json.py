"""Trains on your own LLaVA-format data: photographs, documents, several images, clips, text.

Command:  dflop train experiments/llava_json.py --data.path DIR_OR_JSON
Minutes:  about 3 on 2 cores for a folder of a hundred samples
Expected: the loss falls; summary.md shows the padding and how busy the submeshes were

The folder holds one JSON or JSONL file of records with `image` (a path or a list), `video` or
neither, and `conversations`.
"""

from __future__ import annotations

from dflop_jax import Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config() -> Config:
    return Config(
        model=ModelConfig(size="tiny"),
        data=DataConfig(path="data", max_tiles=6, max_frames=16, max_tokens=1024),
        plan=PlanConfig(devices=4, max_model=1, max_microbatches=8),
        train=TrainConfig(steps=20, global_batch=16, warmup_steps=5),
        run_dir="runs/llava_json",
    )

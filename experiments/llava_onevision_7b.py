"""Fine-tunes LLaVA-OneVision-7B on a node of 8 GPUs of 80 GB; docs/gpus.md goes through it.

Command:  dflop train experiments/llava_onevision_7b.py --model HF --data DIR_OR_JSON_OR_YAML
Minutes:  not known: it has not been run on a GPU; `dflop plan` with --plan.hardware h100
          --plan.devices 8 predicts the step without one
Expected: the loss falls from that of the published weights; summary.md shows the MFU

HF is the folder of llava-hf/llava-onevision-qwen2-7b-ov-hf. Without those two flags the same model
begins at random, on built-in scenes: what the node does is then seen before anything is downloaded.
Rates are those of the published last stage: 1e-5, and 2e-6 in the vision tower.
"""

from __future__ import annotations

import sys

from dflop_jax import CheckpointConfig, Config, DataConfig, ModelConfig, PlanConfig, TrainConfig


def config() -> Config:
    return Config(
        model=ModelConfig(size="llava-ov-7b", dtype="bfloat16"),
        data=DataConfig(max_tiles=9, max_frames=32, max_tokens=8192, workers=16),
        plan=PlanConfig(policy="auto", devices=8, max_model=4, max_microbatches=32),
        train=TrainConfig(
            steps=1000,
            global_batch=64,
            learning_rate=1e-5,
            learning_rates=("vision=2e-6",),
            warmup_steps=30,
            weight_decay=0.0,
        ),
        checkpoint=CheckpointConfig(every=250, every_s=0, keep=2),  # 90 GiB each
        run_dir="runs/llava_onevision_7b",
    )


if __name__ == "__main__":
    from dflop_jax.cli import main

    sys.exit(main(["train", __file__, *sys.argv[1:]]))

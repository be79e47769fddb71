"""What a run of a published model and a data file starts from where the user says nothing: values
that do a pretrained model no harm, and where each is from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflop_jax.front.model_folder import token_limit
from dflop_jax.front.setting import Setting

# Learning rates that are usual for fine-tuning: adapters begin as nothing and take ten times that
# of whole weights.
FULL_RATE, LORA_RATE = 1e-5, 1e-4
WARMUP = 0.03  # of the steps
LONGEST_NAME = 40  # characters of a model's or dataset's name in a folder's name
SNAPSHOTS = "snapshots"  # the hub's cache has models--OWNER--NAME/snapshots/REVISION
FOLDER = re.compile(r"[^\w.-]+")


def model_defaults(config: Mapping[str, Any], *, gpus: bool, lora: bool) -> list[Setting]:
    """Defaults of a model with published weights, by its config.json, the devices and whether
    adapters are trained."""
    if gpus:
        dtype = Setting("model.dtype", "bfloat16", "on GPUs; the optimizer keeps float32")
    else:
        dtype = Setting("model.dtype", "float32", "on CPUs")
    how = "of adapters on published weights" if lora else "of all of published weights"
    return [
        dtype,
        token_limit(config),
        Setting("train.learning_rate", LORA_RATE if lora else FULL_RATE, how),
        Setting("train.epochs", 1.0, "every sample once"),
        Setting("train.warmup_ratio", WARMUP, "of the steps"),
    ]


def run_dir(model: str, data: str) -> Setting:
    """A folder of its own for every run, named by model, data and time."""
    return Setting("run_dir", f"runs/{named(model, data, '{time}')}", "by model, data and time")


def named(model: str, data: str, *more: str) -> str:
    """A file's or folder's name of a model, data and what else there is."""
    return "-".join([n for n in (_short(model), _short(data)) if n] + list(more))


def _short(path: str) -> str:
    """A model's or dataset's name, as part of a folder's name."""
    place = Path(path).absolute() if path else Path()
    name = place.stem if place.is_file() else place.name
    if place.parent.name == SNAPSHOTS:
        name = place.parent.parent.name.rpartition("--")[2]
    return FOLDER.sub("-", name.replace("{", "-").replace("}", "-"))[:LONGEST_NAME].strip("-.")

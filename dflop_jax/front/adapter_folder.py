"""What a folder of adapters says of a run that goes on training them."""

from __future__ import annotations

from pathlib import Path

from dflop_jax.config import ModelConfig
from dflop_jax.front.setting import Setting
from dflop_jax.train.initial import map_of
from dflop_jax.train.prepare import build_model
from dflop_jax.weights import read_adapters
from dflop_jax.weights.adapter import CONFIG, WEIGHTS


def adapter_settings(folder: Path, model: ModelConfig, flag: str) -> list[Setting]:
    """The settings under which a model has the adapters of a folder.

    Args:
      model: that they adapt.
      flag: that names the folder.

    Raises:
      ValueError: see `weights.read_adapters`.
    """
    plain = build_model(model)
    found = read_adapters(folder, map_of(plain, "", True), plain.modules)
    form, matrices = f"{CONFIG} of {flag}", f"{WEIGHTS} of {flag}"
    others = tuple(f"{name}={n}" for name, n in found.ranks.items() if n != found.rank)
    settings = [
        Setting("model.adapters", str(folder), flag),
        Setting("train.lora_rank", found.rank, f"r of {form}"),
        Setting("train.lora_alpha", found.alpha, f"lora_alpha of {form}"),
        Setting("train.lora_dropout", found.dropout, f"lora_dropout of {form}"),
        Setting("train.lora_targets", tuple(found.ranks), matrices),
    ]
    if others:
        settings.append(Setting("train.lora_ranks", others, matrices))
    return settings

"""Write LoRA adapters as a folder that `peft` loads on top of the base model.

The folder has A [rank, in] and B [out, rank] for each adapted matrix, in the layout that the matrix
has in a checkpoint. For a convolution, A is a convolution to `rank` features and B is pointwise.
A fused checkpoint tensor, which stacks several parameters by rows, gets one adapter whose rank is
the sum of theirs; B is 0 outside of each parameter's rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.contract import ADAPTER, Params, adapter_of
from dflop_jax.weights import write
from dflop_jax.weights.contract import Tensor, WeightMap, group_by_name, joined_shape
from dflop_jax.weights.write import WrittenTensor, atomic_folder, check_dtype, gather_to_host

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MODEL_PREFIX = "base_model.model."  # peft's prefix for names of the wrapped model


def write_adapter(
    path: str | Path,
    map_: WeightMap,
    params: Mapping[str, Params],
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    base: str = "",
    dtype: str = "float32",
) -> None:
    """Write a model's adapters atomically to the folder `path`, which must not exist.

    Args:
      map_: maps the base model's parameters to checkpoint tensors.
      params: module -> part -> parameters, adapters included; layers are stacked.
      rank: the default rank, for `peft`'s config.
      alpha: an adapter's output is scaled by alpha / rank.
      dropout: fraction of an adapter's inputs that training dropped.
      base: name or folder of the base model; "" if unknown.
      dtype: "float32", "bfloat16" or "float16".

    Raises:
      ValueError: the folder exists, there are no adapters, or an adapted parameter is in no tensor.
    """
    check_dtype(dtype)
    tensors, ranks = [], {}
    for tensor, parts, n_rows in adapted_tensors(map_, params):
        name = map_.module_name(tensor).removesuffix(".weight")
        a, b = _join_adapters(parts, n_rows)
        ranks[name] = a.shape[0]
        for side, array in (("A", a), ("B", b)):
            full_name = f"{MODEL_PREFIX}{name}.lora_{side}.weight"
            values = partial(np.asarray, array)
            tensors.append(WrittenTensor(full_name, array.shape, np.dtype(dtype), values))
    config = {  # what peft's `LoraConfig` reads
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(ranks),
        "rank_pattern": {name: r for name, r in sorted(ranks.items()) if r != rank},
        "alpha_pattern": {},
    }
    with atomic_folder(path) as folder:
        write.write_file(folder / WEIGHTS, sorted(tensors, key=lambda t: t.name))
        write.write_json(folder / CONFIG, config)


# (a parameter, which is a whole checkpoint tensor or some of its rows; its adapter)
_AdaptedPart = tuple[Tensor, Mapping[str, Any]]


def adapted_tensors(
    map_: WeightMap, params: Mapping[str, Params]
) -> list[tuple[str, list[_AdaptedPart], int]]:
    """Return (tensor's name, adapted parts, number of rows) of each checkpoint tensor with
    adapters. `params` may also hold shapes.

    Raises:
      ValueError: there are no adapters, or an adapted parameter is in no checkpoint tensor.
    """
    adapters = {
        (module, part, name): pair
        for module, parts in params.items()
        for part, tree in parts.items()
        if part == ADAPTER or part.endswith(f"_{ADAPTER}")
        for name, pair in tree.items()
    }
    if not adapters:
        raise ValueError("there are no adapters to write; train with train.lora_rank")
    adapted, written = [], set()
    for tensor, parts in group_by_name(map_.tensors).items():
        keys = [(t.module, adapter_of(t.part), ".".join(t.path[:-1])) for t in parts]
        adapted_parts = [
            (t, adapters[k])
            for t, k in zip(parts, keys, strict=True)
            if k in adapters and t.path[-1] == "kernel"
        ]
        if adapted_parts:
            adapted.append((tensor, adapted_parts, joined_shape(parts)[0]))
            written.update(keys)
    if missing := sorted(adapters.keys() - written):
        names = ", ".join(".".join(keys) for keys in missing)
        raise ValueError(
            f"a published checkpoint has no matrix for the adapters {names}; leave out --adapter, "
            "which folds them in"
        )
    return adapted


def _join_adapters(parts: Sequence[_AdaptedPart], n_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B of a checkpoint tensor; `peft` scales them by alpha / (sum of the ranks)."""
    pairs = [
        to_file_pair(t, *(gather_to_host(pair[k], t.layer, t.name) for k in "ab"))
        for t, pair in parts
    ]
    whole_a = np.concatenate([a for a, _ in pairs])
    whole_b = np.zeros((n_rows, len(whole_a), *pairs[0][1].shape[2:]), whole_a.dtype)
    rank_offset = 0
    for (t, _), (a, b) in zip(parts, pairs, strict=True):
        rank_scale = len(whole_a) / len(a)
        whole_b[t.offset : t.offset + len(b), rank_offset : rank_offset + len(a)] = rank_scale * b
        rank_offset += len(a)
    return whole_a, whole_b


def to_file_pair(t: Tensor, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return an adapter in a file's layout, A [rank, *in] and B [out, rank, ...], from the layout
    of parameters, a [*in, rank] and b [rank, *out]. `t` is the adapted kernel."""
    layout, rank = t.layout, a.shape[-1]
    n_out = len(layout.splits[0])
    inner = [i for i in layout.order if i >= n_out]  # in the parameter's order
    outer = [i for i in layout.order if i < n_out]
    a = a.reshape(*(layout.split[i] for i in inner), rank)
    a = a.transpose(len(inner), *np.argsort(inner)).reshape(rank, *layout.file_shape[1:])
    b = b.reshape(rank, *(layout.split[i] for i in outer))
    b = b.transpose(*(1 + np.argsort(outer)), 0)
    points = (1,) * (len(layout.file_shape) - 2)
    return a, b.reshape(layout.file_shape[0], rank, *points)

"""A folder of adapters, as `peft` writes it: what it says, and folded into the parameters that they
adapt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by its name from here on)
import numpy as np
from safetensors import SafetensorError, safe_open

from dflop_jax.contract import Params
from dflop_jax.weights.adapter import CONFIG, MODEL_PREFIX, WEIGHTS
from dflop_jax.weights.contract import Tensor, WeightMap
from dflop_jax.weights.folder import CONFIG as MODEL_CONFIG

Pair = dict[str, np.ndarray]
# What peft has of adapters that is more than a product beside a matrix.
_REFUSED = ("use_dora", "use_rslora", "fan_in_fan_out", "modules_to_save", "layers_pattern",
            "layer_replication", "alora_invocation_tokens", "use_qalora", "lora_bias")  # fmt: skip


def fold_adapter(
    path: str | Path, map_: WeightMap, params: Mapping[str, Params]
) -> dict[str, Params]:
    """Parameters with the adapters of a folder folded in, each where and in the type it was.

    Args:
      map_: which parameter is which tensor of the model that is adapted.
      params: by module its parts, layers stacked, whole or in shards.

    Raises:
      ValueError: there are no such adapters, or they adapt another model.
    """
    folder = Path(path)
    config, pairs = read_adapter_config(folder), read_pairs(folder, map_)
    by_leaf: dict[tuple[str, ...], list[tuple[Tensor, np.ndarray]]] = {}
    for t in map_.tensors:
        name = module_of(map_, t)
        if t.name.endswith(".weight") and name in pairs:
            delta = scale_of(config, name, pairs[name]) * _product(folder, name, pairs[name])
            by_leaf.setdefault((t.module, t.part, *t.path), []).append((t, delta))
    out = {m: {part: dict(tree) for part, tree in parts.items()} for m, parts in params.items()}
    for (module, part, *inner), deltas in by_leaf.items():
        out[module][part] = _added(folder, out[module][part], tuple(inner), deltas)
    return out


def _added(
    folder: Path, tree: Any, path: tuple[str, ...], deltas: list[tuple[Tensor, np.ndarray]]
) -> Any:
    """A tree of parameters with something added to one of its leaves."""
    first, *rest = path
    if rest:
        return {**tree, first: _added(folder, tree[first], tuple(rest), deltas)}
    leaf = tree[first]
    whole = np.zeros(leaf.shape, np.float32)
    for t, delta in deltas:
        rows, layout = t.layout.file_shape[0], t.layout
        piece = delta[t.offset : t.offset + rows]
        if piece.shape != layout.file_shape:
            raise ValueError(
                f"{folder}: adapts {t.name} of {list(delta.shape)}, which has "
                f"{list(layout.file_shape)} here; give its model"
            )
        value = piece.reshape(layout.split).transpose(layout.order).reshape(layout.shape)
        whole[... if t.layer is None else t.layer] += value
    more = jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])
    added = jnp.asarray(leaf, jnp.float32) + more
    return {**tree, first: jax.device_put(added.astype(leaf.dtype), leaf.sharding)}


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """A folder's adapter_config.json.

    Raises:
      ValueError: there is none, or it is of adapters that are more than a product beside a matrix,
        or they are not in safetensors.
    """
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as e:
        raise ValueError(f"{folder}: no {CONFIG} to read ({e}); give a folder of peft's") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise ValueError(f"{folder}: adapters of the kind {kind} are not read; give LORA")
    more = [name for name in _REFUSED if config.get(name)]
    if more or config.get("bias", "none") != "none":
        raise ValueError(
            f"{folder}: has {more[0] if more else 'bias'}, which is not read; merge it into its "
            "model by peft (merge_and_unload)"
        )
    if not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder}: no {WEIGHTS}; adapters in a pickle are not read: load them by peft and "
            "write them anew: save_pretrained(FOLDER, safe_serialization=True)"
        )
    return dict(config)


def adapter_base(folder: Path) -> str | None:
    """The name or folder of the model that a folder of adapters is of, "" where it names none; None
    where it is no folder of adapters alone.

    Raises:
      ValueError: see `read_adapter_config`.
    """
    if not (folder / CONFIG).is_file() or (folder / MODEL_CONFIG).is_file():
        return None
    return str(read_adapter_config(folder).get("base_model_name_or_path") or "")


def read_pairs(folder: Path, map_: WeightMap) -> dict[str, Pair]:
    """A and B of each adapted matrix, float32, by the name of its module.

    Raises:
      ValueError: they cannot be read, or adapt what the model has not.
    """
    pairs: dict[str, Pair] = {}
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118
                match = re.fullmatch(
                    rf"{re.escape(MODEL_PREFIX)}(.+)\.lora_([AB])(?:\.\w+)?\.weight", key
                )
                if match is None:
                    raise ValueError(f"{key} is no matrix of an adapter; merge it by peft")
                value = np.asarray(file.get_tensor(key)).astype(np.float32)
                pairs.setdefault(match[1], {})[match[2]] = value
    except (OSError, ValueError, SafetensorError) as e:
        raise ValueError(f"{folder / WEIGHTS}: {e}; give a folder of peft's") from None
    for name, pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise ValueError(f"{folder / WEIGHTS}: {name} has no A or no B; export it again")
    if not pairs:
        raise ValueError(f"{folder / WEIGHTS}: has no adapters; export it again")
    names = {module_of(map_, t) for t in map_.tensors}
    if unknown := sorted(pairs.keys() - names):
        raise ValueError(f"{folder}: adapts {unknown[0]}, which the model has not; give its model")
    return pairs


def module_of(map_: WeightMap, t: Tensor) -> str:
    """What transformers calls the module that has a matrix."""
    return map_.module_name(t.name).removesuffix(".weight")


def two_sides(folder: Path, name: str, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """A [rank, *in] and B [out, rank] of an adapter; ValueError if they are none."""
    a, b = pair["A"], pair["B"]
    if b.ndim < 2 or a.shape[0] != b.shape[1] or b.size != b.shape[0] * b.shape[1]:
        raise ValueError(
            f"{folder}: A {list(a.shape)} and B {list(b.shape)} of {name} are no adapter; export "
            "it again"
        )
    return a, b.reshape(b.shape[:2])


def _product(folder: Path, name: str, pair: Pair) -> np.ndarray:
    """What an adapter adds to its matrix [out, *in], not scaled."""
    a, b = two_sides(folder, name, pair)
    return np.tensordot(b, a, 1)


def scale_of(config: Mapping[str, Any], name: str, pair: Pair) -> float:
    """What an adapter's product is multiplied by."""
    patterns = config.get("alpha_pattern") or {}
    alphas = (a for key, a in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", name))
    return float(next(alphas, config["lora_alpha"])) / pair["A"].shape[0]

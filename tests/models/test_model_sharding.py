"""The modules inside a shard_map that is manual over (stage, data) and auto over model."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from model_fields import PARTS, fields, full_params

from dflop_jax.contract import MODEL_SHARDED, Module
from models.audio import AudioModule
from models.decoder import DecoderModule
from models.sizes import AUDIO, DECODERS, VISION
from models.vit import VisionModule

MANUAL = ("stage", "data")
N_STAGES, N_DATA, N_MODEL = 2, 2, 2


def _mesh():
    devices = np.array(jax.devices()[: N_STAGES * N_DATA * N_MODEL])
    return Mesh(devices.reshape(N_STAGES, N_DATA, N_MODEL), ("stage", "data", "model"))


def _shardings(module, mesh):
    """Layers over (stage, model), ends over model."""

    def of_part(part):
        leading = ("stage",) if part == "layers" else ()

        def sharding(names):
            split = ("model" if name in MODEL_SHARDED else None for name in names)
            return NamedSharding(mesh, P(*leading, *split))

        axes = module.logical_axes(part)
        return jax.tree.map(sharding, axes, is_leaf=lambda x: isinstance(x, tuple))

    return {part: of_part(part) for part in PARTS}


def _objective(module, params, batch):
    """A scalar of one data rank: the loss, or a fixed projection of an encoder's features."""
    x = module.entry(params["entry"], batch)
    step = jax.checkpoint(lambda x, p: (module.layer(p, x, batch), None))
    x, _ = jax.lax.scan(step, x, params["layers"])
    out = module.exit(params["exit"], x, batch, params["entry"] if module.tied else None)
    if isinstance(out, dict):
        return out["loss_sum"], out["correct"]
    wave = jnp.sin(jnp.arange(out.shape[-1], dtype=jnp.float32))[None, None]
    return jnp.sum(out.astype(jnp.float32) * wave), jnp.sum(out.astype(jnp.float32))


def _varying(tree, axes):
    return jax.tree.map(lambda a: jax.lax.pcast(a, axes, to="varying"), tree)


def _per_rank(module, params, batch):
    """Each stage runs its own layers on its data rank's rows; gradients stay unreduced."""
    params = {
        "entry": _varying(params["entry"], MANUAL),
        "layers": _varying(params["layers"], ("data",)),
        "exit": _varying(params["exit"], MANUAL),
    }
    batch = _varying(batch, ("stage",))
    objective = jax.value_and_grad(functools.partial(_objective, module), has_aux=True)
    value, grads = objective(params, batch)
    return jax.tree.map(lambda a: a[None, None], value), jax.tree.map(lambda g: g[None], grads)


def make_sharded(module, mesh):
    """(params, batch) -> (values, gradients) of every rank, as the engine places them."""
    per_rank = P(("stage", "data"))
    return jax.shard_map(
        functools.partial(_per_rank, module),
        mesh=mesh,
        in_specs=({"entry": P(), "layers": P("stage"), "exit": P()}, P("data")),
        out_specs=(
            P("stage", "data"),
            {"entry": per_rank, "layers": P("data", "stage"), "exit": per_rank},
        ),
        axis_names=set(MANUAL),
    )


def _run_sharded(module, params, batch, mesh):
    params = jax.device_put(params, _shardings(module, mesh))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    return jax.jit(make_sharded(module, mesh))(params, batch)


def _run_plain(module, params, batch):
    """The same, one (stage, data rank) at a time on one device."""
    run = jax.jit(jax.value_and_grad(functools.partial(_objective, module), has_aux=True))
    half = module.n_layers // N_STAGES
    out = {}
    for stage in range(N_STAGES):
        for rank in range(N_DATA):
            layers = jax.tree.map(lambda a, s=stage: a[s * half : (s + 1) * half], params["layers"])
            rows = jax.tree.map(lambda a, r=rank: jnp.split(a, N_DATA)[r], batch)
            out[stage, rank] = run({**params, "layers": layers}, rows)
    return out


MODULES: dict[str, Callable[[jnp.dtype], Module]] = {
    "vision": lambda dtype: VisionModule(VISION["nano"], 32, dtype),
    "internvit": lambda dtype: VisionModule(
        dataclasses.replace(VISION["internvit-nano"], qkv_bias=False, qk_norm=True, rms_norm=True),
        32,
        dtype,
    ),
    "audio": lambda dtype: AudioModule(AUDIO["whisper-nano"], 32, dtype),
    "tied": lambda dtype: DecoderModule(DECODERS["nano"], dtype),
    "untied, chunked head": lambda dtype: DecoderModule(
        dataclasses.replace(DECODERS["nano"], tied=False, logits_elements=512 * 5), dtype
    ),
}


@pytest.mark.slow(first=2)
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("vision", "bfloat16"),
        ("internvit", "float32"),
        ("audio", "float32"),
        ("tied", "float32"),
        ("untied, chunked head", "float32"),
    ],
)
def test_sharded_equals_one_device(name, dtype):
    module = MODULES[name](jnp.dtype(dtype))
    params = full_params(module)
    batch = fields(module, items=4, tokens=8, seed=1)
    tolerance = 1e-5 if dtype == "float32" else 5e-2
    (values, _), grads = jax.device_get(_run_sharded(module, params, batch, _mesh()))
    alone = jax.device_get(_run_plain(module, params, batch))
    half = module.n_layers // N_STAGES
    for (stage, rank), ((value, _), grad) in alone.items():
        np.testing.assert_allclose(values[stage, rank], value, rtol=tolerance)
        place = stage * N_DATA + rank
        layers = slice(stage * half, (stage + 1) * half)
        # One scale for all: the encoder's key bias has no effect, its gradient is rounding only.
        scale = max(np.abs(g).max() for g in jax.tree.leaves(grad))
        for part in PARTS:
            for whole, want in zip(
                jax.tree.leaves(grads[part]), jax.tree.leaves(grad[part]), strict=True
            ):
                got = whole[rank, layers] if part == "layers" else whole[place]
                np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=tolerance)

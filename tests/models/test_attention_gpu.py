"""Which blocks the GPU kernels visit, how they are chosen, and that they lower."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from model_fields import fields, full_params, outputs
from test_attention import mask_of, pictures_in

from dflop_jax.contract import MODEL_SHARDED
from models import attention_choice, attention_cudnn, attention_gpu, attention_tokamax
from models.attention import attention, last_visible_tokens
from models.attention_choice import check_kernel, choose_kernel, skips
from models.attention_kernels import MaskRule, TokenMask
from models.decoder import DecoderModule
from models.llava import build
from models.sizes import DECODERS, VISION
from models.vit import VisionModule

F32, BF16, F16 = (jnp.dtype(n) for n in ("float32", "bfloat16", "float16"))


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize(
    "causal, window, packed, pictures",
    [(False, 0, True, False), (True, 0, True, False), (True, 1, False, False),
     (True, 100, False, False), (True, 512, False, False), (True, 0, True, True),
     (True, 40, True, True)],
)  # fmt: skip
def test_visited_blocks_are_those_that_are_seen(causal, window, packed, pictures, keys):
    """Against every pair of tokens: none is missed, and padding visits none."""
    T, held, visited = 512, 128, 32
    ids = np.sort(np.random.default_rng(1).integers(1, 9, (2, T)), axis=1).astype(np.int32)
    ids[:, 380:] = 0
    ids = ids if packed else np.ones((2, T), np.int32)
    shown = pictures_in(ids, 2, at_most=90) if pictures else None
    reach = np.asarray(last_visible_tokens(shown, jnp.asarray(ids))) if pictures else None
    marks = TokenMask(ids if packed else None, reach)
    sees = MaskRule(causal, window)
    start, stop = attention_gpu._block_spans(
        marks, T, held, visited, mask_rule=sees, held_are_keys=keys
    )
    seen = mask_of(ids, causal, window, shown) & (ids[:, :, None] > 0)
    seen = seen.swapaxes(1, 2) if keys else seen  # [row, held token, visited token]
    meet = seen.reshape(2, T // held, held, T // visited, visited).any(axis=(2, 4))
    for row, i in np.ndindex(*meet.shape[:2]):
        blocks = np.flatnonzero(meet[row, i])
        first, last = (int(a[row % len(a), i]) for a in (start, stop))
        if pictures:
            assert not len(blocks) or (first <= blocks[0] and last > blocks[-1])
        else:
            assert (first, last) == (blocks[0], blocks[-1] + 1) if len(blocks) else first == last
    assert packed != meet[:, 3].any()


def test_the_kernel_is_a_choice_of_the_model():
    batch, found = fields(DecoderModule(DECODERS["nano"], F32), 2, 150), {}
    for kernel in ("xla", "pallas"):
        module = DecoderModule(DECODERS["nano"], F32, attention_kernel=kernel)
        params = full_params(module)
        loss = jax.jit(jax.value_and_grad(lambda p, m=module: outputs(m, p, batch)["loss_sum"]))
        assert ("packed_attention" in str(jax.make_jaxpr(loss)(params))) == (kernel == "pallas")
        found[kernel] = loss(params)
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-3)
    jax.tree.map(close, *found.values())
    modules = build("nano", attention_kernel="xla").modules.values()
    assert {m.attention_kernel for m in modules} == {"xla"}
    with pytest.raises(ValueError, match="unknown attention kernel 'fast'; known: auto, cudnn"):
        check_kernel("fast")


# ---- the choice by the chip, not the host ----

TEXT, TILES, HEAD_72 = (1, 8192, 28, 128), (64, 729, 16, 64), (64, 729, 16, 72)
PACKED, WHOLE = True, False


@pytest.mark.parametrize(
    "chip, dtype, shape, packed, auto, cudnn",
    [
        # Rows of one segment: cuDNN from Ampere on, with heads as they are.
        ("sm_80", BF16, TILES, WHOLE, "cudnn_forward", "cudnn"),
        ("sm_89", BF16, HEAD_72, WHOLE, "cudnn_forward", "cudnn"),
        ("sm_90", F16, HEAD_72, WHOLE, "cudnn_forward", "cudnn"),
        ("sm_120", BF16, TEXT, WHOLE, "cudnn_forward", "cudnn"),
        ("sm_90", BF16, (1, 512, 4, 160), WHOLE, "pallas", "pallas"),
        ("sm_90", BF16, (1, 512, 4, 20), WHOLE, "pallas", "pallas"),
        # Packed rows.
        ("sm_80", BF16, TEXT, PACKED, "pallas", "pallas"),
        ("sm_90", BF16, TEXT, PACKED, "tokamax_forward", "tokamax_forward"),
        ("sm_90", BF16, (1, 512, 4, 256), PACKED, "tokamax_forward", "tokamax_forward"),
        ("sm_90", BF16, (1, 512, 4, 264), PACKED, "pallas", "pallas"),
        ("sm_100", BF16, TEXT, PACKED, "pallas", "pallas"),
        # What the kernels do not compute, or no faster.
        ("sm_90", BF16, (1, 512, 4, 520), PACKED, "xla", "xla"),
        ("sm_90", F32, TEXT, PACKED, "xla", "xla"),
        ("sm_75", BF16, TEXT, PACKED, "xla", "xla"),
        ("sm_90", BF16, (4, 64, 2, 64), PACKED, "xla", "xla"),
        ("cpu", BF16, TEXT, PACKED, "xla", "xla"),
        ("tpu", BF16, TILES, WHOLE, "xla", "xla"),
        ("", BF16, TEXT, PACKED, "xla", "xla"),
    ],
)
def test_choice(monkeypatch, chip, dtype, shape, packed, auto, cudnn):
    want = {"auto": auto, "cudnn": cudnn, "pallas": "pallas", "xla": "xla"}
    assert set(want) == set(attention_choice.KERNELS)
    for is_available in (True, False):
        for library in (attention_cudnn, attention_tokamax):
            monkeypatch.setattr(library, "is_available", lambda has=is_available: has)
        for asked, chosen in want.items():
            chosen = chosen if is_available or chosen == "xla" else "pallas"
            assert choose_kernel(asked, chip, dtype, shape, is_packed=packed) == chosen
            _, tokens, _, dim = shape
            assert skips(asked, chip, dtype, dim, tokens) == (chosen != "xla")


# ---- what the interpreter takes, Triton need not: compiled for a GPU, without one ----

H100 = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
KERNELS = ("forward", "kv_gradient", "q_gradient")
# From 0.11 on jax announces the end of this backend, which 0.12 still has.
triton = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def lower(function, *args):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H100)):
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def calls_in(text):
    return {name: text.count(f'"packed_attention_{name}"') for name in KERNELS}


@triton
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_attention_lowers_for_a_gpu(dtype, packed):
    head_dim = 128 if packed else 72
    q, k, v = (jax.ShapeDtypeStruct((2, 384, n, head_dim), dtype) for n in (14, 2, 2))
    ids = jax.ShapeDtypeStruct((2, 384), jnp.int32) if packed else None

    def run(q, k, v, ids):
        by = {"causal": packed, "kernel": "pallas", "chip": "sm_90"}
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, ids, **by), q, k, v)
        return pull(out)

    assert calls_in(lower(run, q, k, v, ids)) == dict.fromkeys(KERNELS, 1)


def varying(tree, *axes):
    return jax.tree.map(lambda a: jax.lax.pcast(a, axes, to="varying"), tree)


@triton
@pytest.mark.parametrize("name", ["decoder", "vision"])
def test_they_lower_inside_the_pipeline(name):
    """As the engine runs a layer: manual over stage and data, automatic over model."""
    axes = (AxisType.Auto,) * 3
    mesh = AbstractMesh((2, 2, 2), ("stage", "data", "model"), axes, abstract_device=H100)
    module = {
        "decoder": DecoderModule(DECODERS["nano"], BF16, attention_kernel="pallas"),
        "vision": VisionModule(VISION["nano"], 8, BF16, "pallas"),
    }[name].on_chip("sm_80")

    def total(layers, x, batch):
        step = jax.checkpoint(lambda x, p: (module.layer(p, x, batch), None))
        return jnp.sum(jax.lax.scan(step, x, layers)[0].astype(F32))

    def gradients(layers, entry, batch):
        batch = varying(batch, "stage")
        x = module.entry(varying(entry, "stage", "data"), batch)
        grads = jax.grad(total)(varying(layers, "data"), x, batch)
        return jax.tree.map(lambda g: g[None], grads)

    def placed(a, names, lead=()):
        split = ("model" if name in MODEL_SHARDED else None for name in names)
        return jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, P(*lead, *split))
        )

    params, batch = full_params(module), fields(module, 4, 100)
    stacked = partial(placed, lead=("stage",))
    layers = jax.tree.map(stacked, params["layers"], module.logical_axes("layers"))
    entry = jax.tree.map(placed, params["entry"], module.logical_axes("entry"))
    batch = jax.tree.map(lambda a: placed(a, (), ("data",)), batch)
    specs = {"in_specs": (P("stage"), P(), P("data")), "out_specs": P("data", "stage")}
    run = jax.shard_map(gradients, mesh=mesh, axis_names={"stage", "data"}, **specs)
    # A layer is computed again.
    text = jax.jit(run).trace(layers, entry, batch).lower(lowering_platforms=("cuda",)).as_text()
    assert calls_in(text) == {"forward": 2, "kv_gradient": 1, "q_gradient": 1}

"""The choice of an attention kernel as a table, and that it is the chip's and not the host's."""

import jax
import jax.numpy as jnp
import pytest

from models import attention_choice, attention_cudnn
from models.attention import attention
from models.attention_choice import choose_kernel, skips

BF16, F16, F32 = (jnp.dtype(n) for n in ("bfloat16", "float16", "float32"))
TEXT, TILES, HEAD_72 = (1, 8192, 28, 128), (64, 729, 16, 64), (64, 729, 16, 72)
PACKED, WHOLE = True, False


@pytest.mark.parametrize(
    "chip, dtype, shape, packed, auto, cudnn",
    [
        # Rows of one piece: cuDNN from Ampere on, with heads as they are.
        ("sm_80", BF16, TILES, WHOLE, "cudnn", "cudnn"),
        ("sm_89", BF16, HEAD_72, WHOLE, "cudnn", "cudnn"),
        ("sm_90", F16, HEAD_72, WHOLE, "cudnn", "cudnn"),
        ("sm_100", BF16, TILES, WHOLE, "cudnn", "cudnn"),
        ("sm_80", BF16, (1, 512, 4, 160), WHOLE, "pallas", "pallas"),
        ("sm_90", BF16, (1, 512, 4, 160), WHOLE, "cudnn", "cudnn"),
        ("sm_90", BF16, (1, 512, 4, 20), WHOLE, "pallas", "pallas"),
        ("sm_90", BF16, (1, 8192, 28, 128), WHOLE, "pallas", "cudnn"),  # all scores: 3.5 GiB
        # Packed rows: cuDNN, in any order, on Hopper and the data centre's Blackwell.
        ("sm_80", BF16, TEXT, PACKED, "pallas", "pallas"),
        ("sm_89", BF16, TEXT, PACKED, "pallas", "pallas"),
        ("sm_90", BF16, TEXT, PACKED, "pallas", "cudnn"),
        ("sm_100", BF16, TEXT, PACKED, "pallas", "cudnn"),
        ("sm_120", BF16, TEXT, PACKED, "pallas", "pallas"),
        ("sm_90", BF16, (80, 8192, 28, 128), PACKED, "pallas", "pallas"),  # places beyond int32
        # What the kernels do not compute, or no faster.
        ("sm_90", F32, TEXT, PACKED, "xla", "xla"),
        ("sm_75", BF16, TEXT, PACKED, "xla", "xla"),
        ("sm_90", BF16, (4, 64, 2, 64), PACKED, "xla", "xla"),
        ("sm_90", BF16, (1, 512, 4, 256), PACKED, "pallas", "cudnn"),
        ("sm_90", BF16, (1, 512, 4, 264), PACKED, "pallas", "pallas"),
        ("sm_80", BF16, (1, 512, 4, 264), WHOLE, "pallas", "pallas"),
        ("sm_90", BF16, (1, 512, 4, 512), PACKED, "pallas", "pallas"),
        ("sm_90", BF16, (1, 512, 4, 520), PACKED, "xla", "xla"),
        ("cpu", BF16, TEXT, PACKED, "xla", "xla"),
        ("tpu", BF16, TILES, WHOLE, "xla", "xla"),
        ("", BF16, TEXT, PACKED, "xla", "xla"),
    ],
)
def test_choice(chip, dtype, shape, packed, auto, cudnn):
    want = {"auto": auto, "cudnn": cudnn, "pallas": "pallas", "xla": "xla"}
    assert set(want) == set(attention_choice.KERNELS)
    for asked, chosen in want.items():
        assert choose_kernel(asked, chip, dtype, shape, is_packed=packed) == chosen
        _, tokens, _, dim = shape
        assert skips(asked, chip, dtype, dim, tokens) == (chosen != "xla")


def test_a_jax_that_binds_cudnn_otherwise(monkeypatch):
    monkeypatch.setattr(attention_cudnn, "AVAILABLE", False)
    assert choose_kernel("cudnn", "sm_90", BF16, TEXT, is_packed=True) == "pallas"
    assert choose_kernel("auto", "sm_80", BF16, TILES, is_packed=False) == "pallas"


@pytest.mark.parametrize(
    "kernel, chip, kernels",
    [
        ("cudnn", "sm_90", {"dot_product_attention_fwd", "packed_attention_forward"}),
        ("cudnn", "sm_80", {"packed_attention_forward"}),
        ("auto", "sm_90", {"packed_attention_forward"}),
        ("auto", "cpu", set()),
    ],
)
def test_what_is_traced_for_a_chip_on_this_host(kernel, chip, kernels):
    q, k, v = (jax.ShapeDtypeStruct((1, 256, n, 64), BF16) for n in (4, 2, 2))
    ids = jax.ShapeDtypeStruct((1, 256), jnp.int32)

    def run(*arrays):
        return attention(*arrays, causal=True, kernel=kernel, chip=chip)

    traced = str(jax.make_jaxpr(run)(q, k, v, ids))
    named = ("dot_product_attention_fwd", "packed_attention_forward")
    assert {name for name in named if name in traced} == kernels

"""Content of Gemma's layers against the entries of the mask that they attend under."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.contract import attention_flops_of, content_flops_of, content_of
from dflop_jax.data.content import counted
from dflop_jax.profile.one_kind import kinds_apart
from dflop_jax.records import Load
from models import gemma, llava
from models.attention import Sight, _mask, reach_of
from models.attention_kernels import Marks
from models.gemma_decoder import GemmaModule
from models.gemma_sizes import GEMMA3, GLOBAL, SLIDING

MODELS = {"gemma3": gemma.build("gemma3-nano")}


def entries(heads, is_visual):
    """Pairs of tokens of one piece that see each other, counted in the mask."""
    n = len(is_visual)
    ids = np.ones((1, n), np.int32)
    reach = reach_of(is_visual[None], ids) if heads.pictures and n else None
    mask = _mask(Marks(ids, reach), (0, n), (0, n), Sight(True, heads.window))
    return int(np.sum(mask))


def told(module, kind, content):
    """The same as the module tells it, by what a layer needs of a pair."""
    heads = module.size.heads(kind)
    flops = module.attention_flops[kind]
    assert set(flops.values()) == {4.0 * heads.n_heads * heads.head_dim}
    return sum(content[name] for name in flops)


@pytest.mark.parametrize("window", [1, 3, 40, 1000])
@pytest.mark.parametrize("pictures", [()])
def test_pairs_are_those_of_the_mask(window, pictures):
    size = GEMMA3["gemma3-nano"].decoder
    size = dataclasses.replace(size, sliding=dataclasses.replace(size.sliding, window=window))
    module = GemmaModule(size, jnp.float32)
    for before, after in ((0, 0), (0, 1), (1, 0), (7, 41)):
        runs = [run for n in pictures for run in (np.ones(n, bool), np.zeros(1, bool))]
        visual = np.concatenate([np.zeros(before, bool), *runs, np.zeros(after, bool)])
        content = content_of(module, len(visual), {"visual": pictures})
        for kind in (SLIDING, GLOBAL):
            assert told(module, kind, content) == entries(size.heads(kind), visual)


def test_modules_that_name_no_features_have_pairs():
    load = Load({"vision": (16, 16), "llm": (14,)})
    assert counted(llava.build("nano"), load) == load
    assert load.content_of("vision") == ((256,), (256,))
    assert load.content_of("absent") == ()


def test_kernels_that_skip_the_rest_are_priced_by_what_is_seen():
    for kernel in ("xla", "pallas"):
        module = gemma.build("gemma3-nano", attention_kernel=kernel).modules["llm"]
        for kind, apart in kinds_apart(module).items():
            want = module.attention_flops[kind] if kernel == "pallas" else {}
            assert content_flops_of(apart) == want


def test_flops_of_text_alone():
    """What `attention_flops_of` tells of a kind, at lengths around its window."""
    apart = kinds_apart(MODELS["gemma3"].modules["llm"])[SLIDING]
    a_pair = attention_flops_of(apart)(1)
    for n in (0, 1, 7, 8, 9, 50):
        seen = sum(min(i + 1, 8) for i in range(n))
        assert attention_flops_of(apart)(n) == seen * a_pair

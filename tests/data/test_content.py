"""Content of Gemma's layers against the entries of the mask that they attend under."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.contract import content_of
from dflop_jax.data.content import content_counter
from dflop_jax.profile.needed import needed_flops
from dflop_jax.records import Load
from dflop_jax.verify.samples import mixed_samples
from models import gemma, gemma4, llava
from models.gemma_decoder import GemmaModule
from models.gemma_sizes import GEMMA3, GEMMA4, GLOBAL, SLIDING

MODELS = {"gemma3": gemma.build("gemma3-nano"), "gemma4": gemma4.build("gemma4-nano")}


def entries(heads, is_visual):
    """How many pairs of tokens of a piece see each other: near ones before, and one's picture."""
    at, changes = np.arange(len(is_visual)), np.diff(is_visual, prepend=False) != 0
    run = np.where(is_visual, changes.cumsum(), -1 - at)
    back = at[:, None] - at
    seen = (back >= 0) | (heads.bidirectional_images & (run[:, None] == run))
    return int((seen & (back < heads.window) if heads.window else seen).sum())


def told(module, kind, content):
    """The same as the module tells it, by what a layer needs of a pair."""
    heads = module.size.heads(kind)
    flops = module.attention_flops[kind]
    assert set(flops.values()) == {4.0 * heads.n_heads * heads.head_dim}
    return sum(content[name] for name in flops)


@pytest.mark.parametrize(
    "window, pictures", [(1, (1,)), (3, (2, 1)), (40, (20, 5, 33)), (1000, ()), (8, (100,))]
)
@pytest.mark.parametrize("size", [GEMMA3["gemma3-nano"].decoder, GEMMA4["gemma4-nano"].decoder])
def test_pairs_are_those_of_the_mask(window, size, pictures):
    size = dataclasses.replace(
        size, sliding_heads=dataclasses.replace(size.sliding_heads, window=window)
    )
    module = GemmaModule(size, jnp.float32)
    for before, after in ((0, 0), (0, 1), (7, 41)):
        runs = [run for n in pictures for run in (np.ones(n, bool), np.zeros(1, bool))]
        visual = np.concatenate([np.zeros(before, bool), *runs, np.zeros(after, bool)])
        content = content_of(module, len(visual), {"visual": pictures})
        for kind in (SLIDING, GLOBAL):
            assert told(module, kind, content) == entries(size.heads(kind), visual)


@pytest.mark.parametrize("name", MODELS)
def test_loads_have_what_the_samples_tokens_see(name):
    """Pictures, clips and text as they are prepared; needed FLOPs count them, too."""
    model = MODELS[name]
    module, seen = model.modules["llm"], set()
    rows = {m: model.piece_tokens.get(m, 72) for m in model.modules}
    needed = needed_flops(model, rows)["llm"]
    for mixed in mixed_samples(model):
        load = content_counter(model)(mixed.sample.load)
        (n,), (vector,) = load.lengths("llm"), load.content_of("llm")
        visual = mixed.sample.fields["llm"].get("is_visual", np.zeros(n, bool))
        content = dict(zip(content_of(module, 0), vector, strict=True))
        attention = 0.0
        for kind in (SLIDING, GLOBAL):
            heads, layers = module.size.heads(kind), module.size.kinds.count(kind)
            assert told(module, kind, content) == entries(heads, visual)
            attention += layers * 4 * heads.n_heads * heads.head_dim * entries(heads, visual)
        assert needed(n, vector) - needed(n, [0] * len(vector)) == pytest.approx(3 * attention)
        assert load.content.keys() == {"llm"}
        seen.add(content["seen_ahead"] > 0)
    assert seen == {False, True}


def test_modules_that_name_no_features_have_pairs():
    load = Load({"vision": (16, 16), "llm": (14,)})
    assert content_counter(llava.build("nano"))(load) == load
    assert load.content_of("vision") == ((256,), (256,))
    assert load.content_of("absent") == ()

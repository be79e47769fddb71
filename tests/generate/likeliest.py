"""Answers against the logits that `dflop verify` compares with transformers': all tokens at once,
with no padding of pictures, no cache and no loop over tokens."""

from dataclasses import replace

import jax
import numpy as np

from dflop_jax.contract import chip_of
from dflop_jax.data.sample import FeatureGather
from dflop_jax.generate.row import pack_row
from dflop_jax.records import Load
from dflop_jax.verify import compare

_run = jax.jit(compare._loss, static_argnums=(0, 1))


def with_answer(sample, tokens):
    """A sample that goes on with these tokens."""
    llm, more = sample.fields["llm"], len(tokens)
    longer = {k: np.pad(a, ((0, more), *[(0, 0)] * (a.ndim - 1))) for k, a in llm.items()}
    longer["tokens"][-more:] = tokens
    if "positions" in llm:
        longer["positions"][-more:] = llm["positions"].max() + 1 + np.arange(more)[:, None]

    def padded(a, value):
        return a if a is None else np.pad(a, ((0, more), (0, 0)), constant_values=value)

    places = {pair: FeatureGather(padded(p.index, -1), padded(p.weight, 0))
              for pair, p in sample.gathers.items()}  # fmt: skip
    load = Load({**sample.load.pieces, "llm": (len(longer["tokens"]),)})
    return replace(sample, fields={**sample.fields, "llm": longer}, gathers=places, load=load)


def assert_likeliest(model, params, sample, tokens, penalty=1.0):
    """Each token of an answer is the likeliest after the sample and those before it."""
    row = pack_row([with_answer(sample, tokens)], model, 8)
    logits = _run(model, chip_of(jax.devices()[0]), params, row)[1]
    whole, start = row.fields["tokens"][0], sample.load.tokens("llm")
    for at in range(start, start + len(tokens)):
        before = whole[:at][row.fields["is_visual"][0][:at] == 0]
        one = np.asarray(logits[0, at - 1])
        less = np.where(one > 0, one / penalty, one * penalty)
        one = np.where(np.isin(np.arange(len(one)), before), less, one)
        assert one.argmax() == whole[at]


def n_compiled(programs):
    """Shapes of the programs that answer that have been compiled."""
    return sum(p._cache_size() for p in (programs.start, programs.step, programs.grow))

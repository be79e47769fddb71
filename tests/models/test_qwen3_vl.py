"""Qwen3-VL's answers against the logits that `dflop verify` compares with transformers'."""

import jax
import numpy as np
import pytest

from dflop_jax.generate.programs import AnswerPrograms, answer_mesh, param_structs
from dflop_jax.generate.row import pack_rows as samples_in_rows
from dflop_jax.generate.sampling import Sampling
from dflop_jax.verify.samples import mixed_samples
from models import qwen3_vl
from tests.generate.likeliest import assert_likeliest
from tests.verify.folders import random_params

MODEL = qwen3_vl.build("qwen3-vl-nano")
SAMPLES = [m.sample for m in mixed_samples(MODEL)[:3]]  # a picture and a clip, two pictures, text


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("ranks, tp, penalty", [(1, 1, 1.0), (2, 2, 1.0), (2, 1, 1.5)])
def test_a_batch_answers_with_the_likeliest_tokens(ranks, tp, penalty):
    """Text, pictures and a clip in one batch, over data ranks and with a split model. A picture at
    its end takes fewer positions than tokens."""
    n, params = 12, random_params(MODEL, 0)
    mesh = answer_mesh(jax.devices(), tp, ranks)
    assert mesh.shape == {"data": ranks, "model": tp}
    here = {m: jax.tree.map(lambda s, a: jax.device_put(a, s.sharding),
                            param_structs(module, mesh), params[m])
            for m, module in MODEL.modules.items()}  # fmt: skip
    rows = samples_in_rows(SAMPLES, MODEL, ranks, 4 // ranks, 128)
    programs, how = AnswerPrograms(MODEL, mesh), Sampling(n, repetition_penalty=penalty)
    found = np.stack([*programs.tokens(here, rows, np.arange(4, dtype=np.uint32), how)])
    said = [found[:, k % ranks * (4 // ranks) + k // ranks] for k in range(3)]
    for sample, tokens in zip(SAMPLES, said, strict=True):
        assert_likeliest(MODEL, params, sample, tokens, penalty)
    assert len({token for tokens in said for token in tokens.tolist()}) > 8  # else any would do
    if tp > 1:
        kept = here["llm"]["layers"]["key"]["kernel"]
        assert kept.addressable_shards[0].data.size * tp == kept.size

"""Adapters of modules with layers of several kinds, as `peft` reads them."""

import warnings

import jax
import numpy as np
import pytest

from dflop_jax.contract import chip_of, folded, n_rows, stacked_parts
from dflop_jax.generate.row import row_of
from dflop_jax.verify import compare, reference
from dflop_jax.verify.results import LOGIT_TOLERANCE, SHARE_OF_ROUNDING
from dflop_jax.verify.samples import mixed_samples
from dflop_jax.weights import AdapterForm, Folder, read_config, write_adapter
from models import gemma4, qwen3_5
from tests.verify import gemma_folders, qwen3_5_folders

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

ALPHA, RANK = 12.0, 2


def base_of(folder, model):
    """The parameters of a folder, as one device holds them."""
    opened, device = Folder(folder, model.weights), jax.devices()[0]
    return {m: compare._read(opened, m, module, device) for m, module in model.modules.items()}


def with_random_adapters(model, params, seed):
    """Adapters of the sizes that the modules say, that act."""
    rng = np.random.default_rng(seed)

    def drawn(a):
        return (0.1 * rng.normal(size=a.shape) / np.sqrt(len(a))).astype(np.float32)

    out = {m: dict(tree) for m, tree in params.items()}
    for m, module in model.modules.items():
        for part in getattr(module, "adapters", {}):
            one = jax.eval_shape(lambda key, p=part, it=module: it.init(p, key), jax.random.key(0))
            rows = n_rows(module, part) if part in stacked_parts(module) else 0
            lead = (rows,) if rows else ()
            full = jax.tree.map(lambda a, lead=lead: np.empty((*lead, *a.shape), bool), one)
            out[m][part] = jax.tree.map(drawn, full)
    return out


def logits_of(model, params, row):
    run = jax.jit(compare._loss, static_argnums=(0, 1))
    _, logits = run(model, chip_of(jax.devices()[0]), params, row.fields, row.media, row.places)
    return np.asarray(logits[0, : int(row.lengths[0])])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind, write, build",
    [
        ("qwen3_5_text", qwen3_5_folders.qwen3_5_text, qwen3_5.build_text),
        ("gemma4_text", gemma_folders.gemma4_text, gemma4.build_text),
    ],
)
def test_peft_reads_the_adapters_of_every_kind(kind, write, build, tmp_path):
    """Also of matrices that are rows of one tensor, and of keys that are values, too."""
    folder = write(tmp_path / "base")
    plain = build(str(folder))
    model = plain.with_lora(RANK, ALPHA, ranks=(("llm.key", 3),))
    params = with_random_adapters(model, base_of(folder, plain), 4)
    write_adapter(tmp_path / "adapter", model.weights, params, AdapterForm(RANK, ALPHA))

    samples = mixed_samples(plain)
    row = row_of([s.sample for s in samples], plain, compare.TOKEN_MULTIPLE)
    got = logits_of(model, params, row)
    loaded = reference._loaded

    def adapted(*args):
        model = peft.PeftModel.from_pretrained(loaded(*args), tmp_path / "adapter")
        return model.requires_grad_(True).base_model.model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_loaded", adapted)
        name = read_config(folder)["architectures"][0]
        single = reference.run(folder, kind, name, samples)
        want = reference.run(folder, kind, name, samples, double=True)
    rounding, _ = compare.logit_errors(np.concatenate(single.logits), want)
    tolerance = max(LOGIT_TOLERANCE, SHARE_OF_ROUNDING * rounding)
    assert tolerance < 1e-4
    error, _ = compare.logit_errors(got, want)
    assert error <= tolerance
    before = logits_of(plain, base_of(folder, plain), row)
    assert np.abs(before - got).max() > 0.003  # they matter
    merged = {m: folded(module, params[m]) for m, module in model.modules.items()}
    error, _ = compare.logit_errors(logits_of(plain, merged, row), want)
    assert error <= tolerance

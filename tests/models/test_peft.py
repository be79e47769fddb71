"""Adapters as `peft` reads them: its logits on transformers' model equal ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflop_jax.contract import chip_of, fold_adapters, n_stacked_layers, stacked_parts
from dflop_jax.generate.row import pack_row
from dflop_jax.verify import compare, reference
from dflop_jax.verify.samples import mixed_samples
from dflop_jax.verify.verify import LOGIT_TOLERANCE, MAX_ROUNDING_RATIO
from dflop_jax.weights import Folder, ModuleParams, read_config, write_adapter, write_folder
from models import gemma4, internvl, qwen3_5, qwen3_vl
from tests.train.lora_cases import with_adapters
from tests.verify import gemma_folders, qwen3_5_folders
from tests.verify.folders import load, random_params

ALPHA, RANK = 12.0, 2
pytestmark = pytest.mark.slow


def loaded(map_):
    """transformers' model of a map's configuration."""
    transformers = load("transformers")
    config = transformers.AutoConfig.for_model(**map_.config)
    return getattr(transformers, map_.config["architectures"][0])(config)


def base_of(folder, model):
    """The parameters of a folder, as one device holds them."""
    opened, device = Folder(folder, model.weights), jax.devices()[0]
    return compare.read_model(opened, model, device)


def with_random_adapters(model, params, seed):
    """Adapters of the sizes that the modules say, that act."""
    rng = np.random.default_rng(seed)

    def drawn(a):
        return (0.1 * rng.normal(size=a.shape) / np.sqrt(len(a))).astype(np.float32)

    out = {m: dict(tree) for m, tree in params.items()}
    for m, module in model.modules.items():
        for part in getattr(module, "adapters", {}):
            one = jax.eval_shape(lambda key, p=part, it=module: it.init(p, key), jax.random.key(0))
            rows = n_stacked_layers(module, part) if part in stacked_parts(module) else 0
            lead = (rows,) if rows else ()
            full = jax.tree.map(lambda a, lead=lead: np.empty((*lead, *a.shape), bool), one)
            out[m][part] = jax.tree.map(drawn, full)
    return out


def logits_of(model, params, row):
    run = jax.jit(compare._loss, static_argnums=(0, 1))
    _, logits = run(model, chip_of(jax.devices()[0]), params, row)
    return np.asarray(logits[0, : int(row.lengths[0])])


# Of layers, a convolution, a connector; ranks by pattern.
TARGETS = ("llm", "vision", "connector.out")
RANKS = (("vision", 3), ("vision.up", 5), ("llm.down", 1), ("connector", 4))
ONE_RANK = {"ranks": (("llm.key", 3),)}


def internvl_folder(path):
    model = internvl.build("internvl-nano")
    held = [ModuleParams(name, tree) for name, tree in random_params(model, 3).items()]
    write_folder(path, model.weights, held)
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "kind, write, build, how",
    [
        ("internvl", internvl_folder, internvl.build, {"targets": TARGETS, "ranks": RANKS}),
        ("qwen3_5_text", qwen3_5_folders.qwen3_5_text, qwen3_5.build_text, ONE_RANK),
        ("gemma4_text", gemma_folders.gemma4_text, gemma4.build_text, ONE_RANK),
    ],
)
def test_peft_reads_the_adapters_of_every_kind(kind, write, build, how, tmp_path):
    """Of layers, a convolution and a connector, with ranks by pattern; of matrices that are rows of
    one tensor, and of keys that are values, too."""
    folder = write(tmp_path / "base")
    plain = build(str(folder))
    model = plain.with_lora(RANK, ALPHA, **how)
    params = with_random_adapters(model, base_of(folder, plain), 4)
    write_adapter(tmp_path / "adapter", model.weights, params, rank=RANK, alpha=ALPHA)

    samples = mixed_samples(plain)
    row = pack_row([s.sample for s in samples], plain, compare.TOKEN_MULTIPLE)
    got = logits_of(model, params, row)
    loaded = reference._load_model

    def adapted(*args):
        model = load("peft").PeftModel.from_pretrained(loaded(*args), tmp_path / "adapter")
        return model.requires_grad_(True).base_model.model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_load_model", adapted)
        name = read_config(folder)["architectures"][0]
        single = reference.run_reference(folder, kind, name, samples)
        want = reference.run_reference(folder, kind, name, samples, double=True)
    rounding, _ = compare.logit_errors(np.concatenate(single.logits), want)
    tolerance = max(LOGIT_TOLERANCE, MAX_ROUNDING_RATIO * rounding)
    assert tolerance < 1e-4
    error, _ = compare.logit_errors(got, want)
    assert error <= tolerance
    before = logits_of(plain, base_of(folder, plain), row)
    assert np.abs(before - got).max() > 0.003  # they matter
    merged = {m: fold_adapters(module, params[m]) for m, module in model.modules.items()}
    error, _ = compare.logit_errors(logits_of(plain, merged, row), want)
    assert error <= tolerance


@pytest.mark.filterwarnings("ignore")
def test_every_matrix_of_a_native_tower_can_be_adapted(tmp_path):
    """A fused matrix, a convolution over frames, mergers of taps."""
    plain = qwen3_vl.build("qwen3-vl-tiny")
    model = plain.with_lora(2, ALPHA, targets=("vision", "connector"))
    params = with_adapters(model, {name: {} for name in model.modules}, 1)
    write_adapter(tmp_path / "adapter", model.weights, params, rank=2, alpha=ALPHA)
    base = loaded(model.weights)
    adapted = load("peft").PeftModel.from_pretrained(base, tmp_path / "adapter")
    held = {n for n, _ in adapted.named_parameters() if ".lora_A." in n}
    assert len(held) == sum(
        module.n_layers if part == "adapter" else 1
        for module in model.modules.values()
        for part in getattr(module, "adapters", {})
        for _ in module.init(part, jnp.zeros(2, jnp.uint32))
    )
    assert any("deepstack_merger_list" in n for n in held)
    first = next(p for n, p in adapted.named_parameters() if "blocks.0.attn.qkv.lora_B" in n)
    b = params["vision"]["adapter"]["qkv"]["b"][0]
    np.testing.assert_array_equal(first.detach().numpy(), b.reshape(2, -1).T)

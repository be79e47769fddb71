"""Adapters as `peft` reads them: its logits on transformers' model equal ours."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import (
    features,
    parameters,
    placed,
    randomise,
    text_batch,
    torch,
    transformers,
)

from dflop_jax.contract import with_adapter
from dflop_jax.weights import AdapterForm, write_adapter
from models import internvl, llava, qwen2_audio, qwen3_vl
from models.composed import Published
from models.processors import MEAN, STD
from models.sizes import DecoderSize, ModelSize, VisionSize
from tests.pipeline.plain import run_module
from tests.train.lora_cases import with_adapters

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft")

ALPHA = 12.0
LOGITS = 1e-5


def loaded(map_, *, meta=False):
    """transformers' model of a map's configuration."""
    kind = map_.config["model_type"]
    config = transformers.AutoConfig.for_model(**{"model_type": kind, **map_.config})
    with torch.device("meta" if meta else "cpu"):
        return getattr(transformers, map_.config["architectures"][0])(config)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_logits_with_ranks_by_pattern_and_targets_in_the_tower(tmp_path):
    """Of layers, a convolution, a connector; two ranks of the LLM's."""
    decoder = DecoderSize(24, 2, 4, 2, 40, 50, rope_theta=1e4, qkv_bias=True, tied=False)
    tower = VisionSize(16, 4, 16, 2, 2, 24, merge=2, post_norm=False, form="internvit")
    plain = Published(ModelSize(decoder, tower, layout="dynamic"), jnp.dtype("float32"))
    ranks = (("vision", 2), ("vision.up", 5), ("llm.down", 1), ("connector", 4))
    model = plain.with_lora(3, ALPHA, targets=("llm", "vision", "connector.out"), ranks=ranks)
    map_ = model.weights
    theirs = randomise(loaded(map_), 3)
    theirs.config.image_token_id = 0
    params = with_adapters(model, parameters(map_, theirs), 4)
    write_adapter(tmp_path / "adapter", map_, params, AdapterForm(3, ALPHA))

    rng = np.random.default_rng(5)
    n = tower.tokens_per_tile
    tokens = np.array([[3, *[0] * n, 7, 9, 2], [4, 5, *[0] * n, 8, 1]])
    pixels = rng.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    normed = ((pixels / 255 - MEAN) / STD).astype(np.float32).transpose(0, 3, 1, 2)
    given = {"input_ids": torch.from_numpy(tokens), "pixel_values": torch.from_numpy(normed)}
    with torch.no_grad():
        before = theirs(**given).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
        want = adapted.eval()(**given).logits.numpy()

    mask = tokens == 0
    vision, llm = (model.modules[name] for name in ("vision", "llm"))
    seen = run_module(vision, params["vision"], {"pixels": jnp.asarray(pixels)})
    got = logits_of(llm, params["llm"], text_batch(tokens, placed(seen, mask), mask))
    assert np.abs(got - want).max() <= LOGITS
    assert np.abs(before - want).max() > 0.1  # they matter
    # Folded in, they say the same.
    folded = {name: model.modules[name].merged(params[name]) for name in params}
    seen = features(plain.modules["vision"], folded["vision"], {"pixels": jnp.asarray(pixels)})
    again = logits_of(llm, folded["llm"], text_batch(tokens, placed(seen, mask), mask))
    assert np.abs(again - want).max() <= LOGITS
    kept = {m.r["default"] for m in adapted.modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert kept == {1, 2, 3, 4, 5}


def logits_of(module, params, batch):
    class Head:
        n_layers, tied = module.n_layers, False
        entry, layer = module.entry, module.layer

        @staticmethod
        def exit(exit_params, x, batch, entry):
            return module.logits(exit_params, x, entry)

    return np.asarray(run_module(Head, params, batch))


@pytest.mark.parametrize(
    "family, size",
    [
        (llava, "llava-ov-7b"),
        (internvl, "internvl-nano"),
        (qwen2_audio, "qwen2-audio-nano"),
        (qwen3_vl, "qwen3-vl-tiny"),
    ],
    ids=["llava", "internvl", "qwen2_audio", "qwen3_vl"],
)
def test_names_are_those_of_a_loaded_model(family, size):
    map_ = family.build(size).weights
    known = dict(loaded(map_, meta=True).named_parameters())
    assert {map_.module_name(t.name) for t in map_.tensors} <= set(known) | set(map_.copies)


@pytest.mark.filterwarnings("ignore")
def test_every_matrix_of_a_native_tower_can_be_adapted(tmp_path):
    """A fused matrix, a convolution over frames, mergers of taps."""
    plain = qwen3_vl.build("qwen3-vl-tiny")
    model = plain.with_lora(2, ALPHA, targets=("vision", "connector"))
    map_ = model.weights
    shapes = {name: {} for name in model.modules}
    params = with_adapters(model, shapes, 1)
    write_adapter(tmp_path / "adapter", map_, params, AdapterForm(2, ALPHA))
    adapted = peft.PeftModel.from_pretrained(loaded(map_), tmp_path / "adapter")
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


def test_what_cannot_be_written(tmp_path):
    model = internvl.build("internvl-nano")
    with pytest.raises(ValueError, match=r"no adapters to write; train with train\.lora_rank"):
        write_adapter(tmp_path / "a", model.weights, {"llm": {}}, AdapterForm(2, 1.0))
    odd = {"llm": {"adapter": {"gait": {}}}}
    with pytest.raises(ValueError, match=r"no matrix for the adapters llm\.adapter\.gait"):
        write_adapter(tmp_path / "a", model.weights, odd, AdapterForm(2, 1.0))
    with pytest.raises(ValueError, match=r"unknown type of weights 'int4'"):
        write_adapter(tmp_path / "a", model.weights, odd, AdapterForm(2, 1.0, dtype="int4"))
    assert not list(tmp_path.iterdir())


def test_a_part_with_an_adapter_gets_it_among_its_parameters():
    assert with_adapter("exit", {"exit": {"x": 1}, "exit_adapter": {"y": 2}}) == {
        "x": 1,
        "adapter": {"y": 2},
    }
    assert with_adapter("tap", {}) is None

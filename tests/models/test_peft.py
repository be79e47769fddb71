"""Adapters as `peft` reads them: its logits on transformers' model equal ours."""

import json
import warnings

import jax
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
from safetensors.numpy import save_file

from dflop_jax.contract import folded, with_adapter
from dflop_jax.train.load_params import shapes_of
from dflop_jax.weights import AdapterForm, fold_adapter, read_adapters, write_adapter
from dflop_jax.weights.contract import by_name, shape_of
from models import internvl, llava, qwen2_audio, qwen3_5, qwen3_vl
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


def assert_read_as_written(folder, plain, model, params):
    """The adapters of a folder, as a model would go on training them, are those that it had."""
    read = read_adapters(folder, plain.weights, plain.modules)
    written = {
        f"{name}/{part}/{matrix}/{side}": array
        for name, module in model.modules.items()
        for part in getattr(module, "adapters", {})
        for matrix, pair in params[name][part].items()
        for side, array in pair.items()
    }
    assert read.arrays.keys() == written.keys()
    for name, array in read.arrays.items():
        np.testing.assert_allclose(array.reshape(written[name].shape), written[name], rtol=1e-6)
    return read


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
    # Read from the folder and folded in, too, into parameters of any type.
    base = {
        name: {p: params[name][p] for p in module.inputs} for name, module in plain.modules.items()
    }
    for dtype, limit in (("float32", 1e-6), ("bfloat16", 0.02)):
        given = jax.tree.map(lambda a, dtype=dtype: jnp.asarray(a, dtype), base)
        read = fold_adapter(tmp_path / "adapter", plain.weights, given)
        for a, b in zip(*map(jax.tree.leaves, (read, folded)), strict=True):
            assert a.dtype == dtype
            np.testing.assert_allclose(a.astype(jnp.float32), b, atol=limit, rtol=limit)
    assert_read_as_written(tmp_path / "adapter", plain, model, params)
    kept = {m.r["default"] for m in adapted.modules() if isinstance(m, peft.tuners.lora.LoraLayer)}
    assert kept == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    "config, tensors, says",
    [
        ({"peft_type": "IA3"}, {}, "adapters of the kind IA3 are not read; give LORA"),
        (
            {"use_dora": True},
            {},
            "has use_dora, which is not read; merge it into its model by peft",
        ),
        ({"bias": "all"}, {}, "has bias, which is not read"),
        ({}, {"x.lora_A.weight": (2, 3), "x.lora_B.weight": (4, 2)}, "adapts x, which the model"),
        ({}, {"x.lora_A.weight": (2, 3)}, "x has no A or no B"),
        ({}, {"x.magnitude": (2,)}, "x.magnitude is no matrix of an adapter"),
        ({}, {}, "has no adapters"),
    ],
)
def test_what_cannot_be_folded_in_is_refused(tmp_path, config, tensors, says):
    map_ = internvl.build("internvl-nano").weights
    more = {"peft_type": "LORA", "lora_alpha": 4, "bias": "none", **config}
    (tmp_path / "adapter_config.json").write_text(json.dumps(more))
    arrays = {f"base_model.model.{n}": np.ones(s, np.float32) for n, s in tensors.items()}
    save_file(arrays, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=says):
        fold_adapter(tmp_path, map_, {})


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
    read = assert_read_as_written(tmp_path / "adapter", plain, model, params)
    assert (read.rank, read.alpha) == (2, ALPHA)
    assert {name.partition(".")[0] for name in read.ranks} == {"vision", "connector"}


def peft_folder(folder, map_, layers, **config):
    """Adapters of some tensors, by name [rows, columns], as peft might have trained them."""
    rng = np.random.default_rng(3)
    names = [map_.module_name(n).removesuffix(".weight") for n in layers]
    arrays = {}
    for name, (rows, columns) in zip(names, layers.values(), strict=True):
        for side, shape in (("A", (3, columns)), ("B", (rows, 3))):
            arrays[f"base_model.model.{name}.lora_{side}.weight"] = rng.normal(size=shape).astype(
                "f"
            )
    more = {"peft_type": "LORA", "r": 3, "lora_alpha": 4, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(more))
    save_file(arrays, folder / "adapter_model.safetensors")


def fused_of(map_):
    """Tensors that several matrices are, and their shapes."""
    named = by_name(map_.tensors).items()
    return {n: shape_of(t) for n, t in named if len(t) > 1 and t[0].path[-1] == "kernel"}


def test_adapters_that_mix_the_matrices_of_a_tensor_add_the_same(tmp_path):
    """What each matrix's own adapter adds is what folding the tensor's in adds."""
    plain = qwen3_5.build_text("qwen3.5-text-nano")
    map_ = plain.weights
    peft_folder(tmp_path, map_, fused_of(map_))
    read = read_adapters(tmp_path, map_, plain.modules)
    assert read.ranks == {"llm.query": 3, "llm.key": 3, "llm.value": 3}
    model = plain.with_lora(3, 4.0, targets=tuple(read.ranks))
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda a: rng.normal(size=a.shape).astype(np.float32),
        {name: shapes_of(module) for name, module in model.modules.items()},
    )
    llm = params["llm"]
    llm |= {p: jax.tree.map(np.zeros_like, llm[p]) for p in model.modules["llm"].adapters}
    for name, array in read.arrays.items():
        module, part, matrix, side = name.split("/")
        held = params[module][part][matrix]
        held[side] = array.reshape(held[side].shape)
    merged = {name: folded(module, params[name]) for name, module in model.modules.items()}
    base = {n: {p: params[n][p] for p in module.inputs} for n, module in plain.modules.items()}
    want = fold_adapter(tmp_path, map_, jax.tree.map(jnp.asarray, base))
    for a, b in zip(*map(jax.tree.leaves, (merged, want)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    "config, n_left_out, says",
    [
        ({}, 1, r"in 2 of 3 layers, and all or none can be trained on; merge it"),
        ({"alpha_pattern": {"in_proj_qkv": 9}}, 0, "gives .*qkv an alpha of its own"),
        ({"use_rslora": True}, 0, "has use_rslora, which is not read; merge it"),
        ({"with_taps": True}, 0, "adapts .*conv1d, which cannot be trained on"),
    ],
)
def test_adapters_that_cannot_be_trained_on(tmp_path, config, n_left_out, says):
    plain = qwen3_5.build_text("qwen3.5-text-nano")
    layers = fused_of(plain.weights)
    if config.get("with_taps"):
        layers |= {"model.layers.0.linear_attn.conv1d.weight": (128, 1)}
    peft_folder(tmp_path, plain.weights, dict(list(layers.items())[n_left_out:]), **config)
    with pytest.raises(ValueError, match=says):
        read_adapters(tmp_path, plain.weights, plain.modules)


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

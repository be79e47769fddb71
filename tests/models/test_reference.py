"""Every family's logits and gradients, and the names and shapes of published checkpoints, against
stored numbers of transformers and diffusers (`make_reference.py`, which says how to make them)."""

import dataclasses

import jax
import numpy as np
import pytest
import reference_cases as cases

from dflop_jax.verify import compare
from dflop_jax.verify.samples import mixed_samples
from dflop_jax.weights import Folder
from models import hf
from models.sizes import VISION
from models.vit import VisionModule
from tests.models import make_reference
from tests.verify.folders import load, random_params

# Of the largest entry: what float32 on our side differs from float64 on theirs.
LOGITS, GRADIENTS = 3e-5, 1e-4
# Random models of these families round as much more: sharp softmax, decays, clipped values.
ROUNDING = dict.fromkeys((n for n in cases.MODELS if n.startswith(("gemma", "qwen3_5"))), 8.0)


@pytest.fixture(scope="module")
def stored():
    with np.load(cases.FILE) as arrays:
        return dict(arrays)


def assert_gradients(got, want, sizes, rounding=1.0):
    """Projections of tensors of these sizes: entries that are off by independent errors add up to
    the root of their number."""
    largest = want[:, -1].max()
    for row, expected, (name, size) in zip(got, want, sorted(sizes.items()), strict=True):
        scale = rounding * GRADIENTS * max(expected[-1], 1e-3 * largest)
        assert np.abs(row - expected).max() <= scale * max(1.0, size**0.5 / 3), name


@pytest.mark.parametrize("name", cases.MODELS)
def test_logits_and_gradients_equal_transformers(stored, name):
    model = cases.MODELS[name]()
    params = random_params(model, cases.SEED)
    logits, gradients = compare.run_model(model, params, mixed_samples(model))
    products, largest = cases.project(logits, "logits")
    want = stored[f"{name}/logits"]
    assert abs(largest - stored[f"{name}/largest"]) <= 8 * LOGITS * max(1.0, largest)
    rounding = ROUNDING.get(name, 1.0)
    tolerance = rounding * LOGITS * max(1.0, largest) * max(1.0, logits.shape[1] ** 0.5 / 10)
    np.testing.assert_allclose(products, want, rtol=0, atol=tolerance)
    arrays = cases.gradients_by_tensor(model.weights, jax.device_get(gradients))
    table = cases.project_gradients(arrays)
    sizes = {n: a.size for n, a in arrays.items()}
    assert_gradients(table, stored[f"{name}/gradients"], sizes, rounding)


def test_the_generator_of_clips_equals_diffusers(stored):
    params = random_params(cases.WAN, cases.SEED)["generator"]
    batch, before = cases.clip_row()
    grad = jax.jit(jax.value_and_grad(cases.clip_loss, (0, 1), has_aux=True))
    (loss, velocity), (grads, text_grad) = grad(params, batch["text"], batch)
    output = cases.FORM.latents(np.asarray(velocity)[before:], cases.FORM.grid(cases.LATENTS))
    np.testing.assert_allclose(output, stored["wan/velocity"], atol=LOGITS)
    np.testing.assert_allclose(loss, stored["wan/loss"], rtol=LOGITS)
    states = slice(cases.FORM.time_tokens, cases.FORM.time_tokens + cases.N_TEXT)
    want = stored["wan/text_gradient"]
    scale = GRADIENTS * np.abs(want).max()
    np.testing.assert_allclose(text_grad[0, states], want, rtol=0, atol=scale)
    grads = {"generator": jax.device_get(grads)}
    arrays = cases.gradients_by_tensor(cases.GENERATOR.weights, grads)
    table = cases.project_gradients(arrays)
    assert_gradients(table, stored["wan/gradients"], {n: a.size for n, a in arrays.items()})


@pytest.mark.parametrize("name", cases.PUBLISHED)
def test_published_sizes_have_the_tensors_of_transformers(stored, name):
    map_ = cases.published_map(name)
    shapes = {t.name: t.layout.file_shape for t in map_.tensors}
    shapes |= {u.name: u.shape for u in map_.unused}
    assert cases.digest(shapes) == stored[f"shapes/{name}"].item()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_stored_numbers_are_those_of_the_installed_packages(stored):
    load("transformers")
    load("diffusers")
    found = make_reference.make_arrays()
    assert found.keys() == stored.keys()
    for name, array in stored.items():
        if array.dtype.kind == "U":
            assert found[name] == array, name
        else:
            np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_tower_is_read_from_a_folder_of_transformers(tmp_path):
    """SigLIP as published, with a text model beside it and one layer more than is used."""
    transformers = load("transformers")
    siglip = dataclasses.replace(VISION["nano"], merge=1, post_norm=False)
    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    tower = hf.tower_weights(VisionModule(siglip, 8, cases.F32)).config
    config = transformers.SiglipConfig(
        vision_config={**tower, "vision_use_head": True},
        text_config={**small, "intermediate_size": 8, "vocab_size": 99},
    )
    theirs = transformers.SiglipModel(config)
    theirs.save_pretrained(tmp_path / "siglip")
    fewer = VisionModule(dataclasses.replace(siglip, n_layers=1), 8, cases.F32)
    source = Folder(tmp_path / "siglip", hf.tower_weights(fewer))
    source.check()
    found = source.read("encoder.layers.0.mlp.fc1.weight", (slice(0, 64), slice(0, 32)))
    want = theirs.vision_model.encoder.layers[0].mlp.fc1.weight
    np.testing.assert_array_equal(found, want.detach().numpy())

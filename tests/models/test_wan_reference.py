"""The generator against diffusers' Wan transformer: outputs, gradients, folders in and out."""

import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import parameters, to_ours, torch
from model_fields import forward
from safetensors.torch import load_file

from dflop_jax.data.datasets.clips import clip_format_of
from dflop_jax.weights import Folder, ModuleParams, write_folder
from models import wan
from models.wan_weights import STEM

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    diffusers = pytest.importorskip("diffusers")

OUTPUTS, GRADIENTS = 1e-5, 1e-4
N_TEXT, LATENTS = 5, (4, 3, 4, 6)  # of the text, and [channels, time, rows, columns]
MODEL = wan.build("nano+wan-nano")
GENERATOR, FORM = MODEL.generator, clip_format_of(MODEL)


@pytest.fixture(scope="module")
def reference():
    """A random transformer of diffusers, no parameter at its initial value."""
    size = GENERATOR.size
    model = diffusers.WanTransformer3DModel(
        patch_size=size.patch, num_attention_heads=size.n_heads, attention_head_dim=size.head_dim,
        in_channels=size.channels, out_channels=size.channels, text_dim=size.text_width,
        freq_dim=size.freq_dim, ffn_dim=size.mlp, num_layers=size.n_layers,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            one = name.endswith("weight") and p.ndim == 1
            noise = rng.normal(size=tuple(p.shape)) / max(p[0].numel(), 5) ** 0.5
            p.copy_(torch.from_numpy((noise + one).astype(np.float32)))
    return model.eval()


def fields(latents, target, text, share):
    """A row of one clip and its caption."""
    grid = FORM.grid(latents.shape)
    tokens = FORM.tokens(N_TEXT, grid)
    before = tokens - int(np.prod(grid))
    of_text = ((FORM.time_tokens, tokens - FORM.time_tokens - N_TEXT), (0, 0))
    batch = {
        **FORM.fields(N_TEXT, grid),
        "latents": np.pad(FORM.patches(latents), ((before, 0), (0, 0))),
        "target": np.pad(FORM.patches(target), ((before, 0), (0, 0))),
        "time": np.full(tokens, 1000 * share, np.float32),
        "text": np.pad(text, of_text),
        "segment_ids": np.ones(tokens, np.int32),
    }
    return {name: jnp.asarray(a[None]) for name, a in batch.items()}, before


def test_outputs_and_gradients_equal_diffusers(reference):
    rng = np.random.default_rng(1)
    latents, target = (rng.normal(size=LATENTS).astype(np.float32) for _ in range(2))
    text = rng.normal(size=(N_TEXT, GENERATOR.size.text_width)).astype(np.float32)
    share = 0.37
    heard = torch.from_numpy(text[None]).requires_grad_()
    theirs = reference(
        torch.from_numpy(latents[None]), torch.tensor([1000 * share]), heard, return_dict=False
    )[0][0]
    their_loss = torch.mean((theirs - torch.from_numpy(target)) ** 2)
    reference.zero_grad()
    their_loss.backward()

    params = parameters(GENERATOR.weights, reference)["generator"]
    batch, before = fields(latents, target, text, share)
    n = int(batch["weights"].sum())

    def loss(params, text):
        batch_now = {**batch, "text": text}
        x = forward(GENERATOR, params, batch_now)
        said = GENERATOR.velocity(params["exit"], x, batch_now)[0]
        return GENERATOR.exit(params["exit"], x, batch_now)["loss_sum"] / n, said

    grad = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (our_loss, said), (grads, text_grad) = grad(params, batch["text"])
    ours = FORM.latents(np.asarray(said)[before:], FORM.grid(LATENTS))
    np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=OUTPUTS)
    np.testing.assert_allclose(our_loss, their_loss.item(), rtol=OUTPUTS)
    named = {name: p.grad.numpy() for name, p in reference.named_parameters()}
    want = to_ours(GENERATOR.weights, named)["generator"]
    found = jax.tree_util.tree_leaves_with_path(want)
    got = jax.tree.leaves(grads)
    assert len(found) == len(got) > 30
    for (path, w), g in zip(found, got, strict=True):
        where = jax.tree_util.keystr(path)
        assert np.abs(w).max() > 0, where
        assert np.abs(g - w).max() <= GRADIENTS * np.abs(w).max(), where
    states = np.asarray(text_grad)[0, FORM.time_tokens : FORM.time_tokens + N_TEXT]
    theirs_grad = heard.grad.numpy()[0]
    assert np.abs(states - theirs_grad).max() <= GRADIENTS * np.abs(theirs_grad).max()


def test_folders_of_diffusers_are_read_and_written(reference, tmp_path):
    reference.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    model = wan.build(f"nano+{tmp_path / 'theirs'}")
    map_ = model.part_weights["generator"]()
    folder = Folder(tmp_path / "theirs", map_)
    folder.check()
    whole = {
        t.name: folder.read(t.name, tuple(slice(0, n) for n in t.layout.file_shape))
        for t in map_.tensors
    }
    params = to_ours(map_, whole)["generator"]
    write_folder(
        tmp_path / "ours", map_, [ModuleParams("generator", params)], max_file_bytes=20_000
    )
    again = diffusers.WanTransformer3DModel.from_config(
        json.loads((tmp_path / "ours" / "config.json").read_text())
    )
    files = (tmp_path / "ours").glob("*.safetensors")
    again.load_state_dict({k: v for file in files for k, v in load_file(file).items()})
    index = json.loads((tmp_path / "ours" / f"{STEM}.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    for name, p in reference.state_dict().items():
        assert torch.equal(p, again.state_dict()[name]), name

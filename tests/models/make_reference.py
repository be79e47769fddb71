"""Stores logits and gradients of transformers and diffusers in tests/models/reference.npz.

usage: python -m tests.models.make_reference   (needs torch, transformers and diffusers)

Run it where `reference_cases` gets a case more; numbers of the others stay as they are.
"""

import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import processor_cases as processors
import reference_cases as cases
from safetensors.numpy import load_file

from dflop_jax.verify import reference
from dflop_jax.verify.samples import mixed_samples
from dflop_jax.weights import ModuleParams, write_folder
from tests.verify.folders import random_params


def write_random_folder(path, model):
    """A folder of random parameters, in float32."""
    params = random_params(model, cases.SEED)
    write_folder(path, model.weights, [ModuleParams(m, tree) for m, tree in params.items()])
    return path


def run_transformers(model, folder):
    """(products and largest entry of the logits, projected gradients) in float64."""
    map_, samples = model.weights, mixed_samples(model)
    kind, name = map_.config["model_type"], map_.config["architectures"][0]
    found = reference.run_reference(folder, kind, name, samples, double=True)
    names = {t.name for t in map_.tensors}
    gradients = {map_.canonical(n): a for n, a in found.gradients.items()}
    products, largest = cases.project(np.concatenate(found.logits), "logits")
    table = cases.project_gradients({n: gradients[n] for n in names})
    return products, largest, table


def run_diffusers(folder):
    """(velocities, loss, gradient of the text, projected gradients) of the generator, float32."""
    import diffusers
    import torch

    size, map_ = cases.GENERATOR.size, cases.GENERATOR.weights
    params = {"generator": random_params(cases.WAN, cases.SEED)["generator"]}
    write_folder(folder, map_, [ModuleParams("generator", params["generator"])])
    model = diffusers.WanTransformer3DModel(
        patch_size=size.patch, num_attention_heads=size.n_heads, attention_head_dim=size.head_dim,
        in_channels=size.channels, out_channels=size.channels, text_dim=size.text_width,
        freq_dim=size.freq_dim, ffn_dim=size.mlp, num_layers=size.n_layers,
    )  # fmt: skip
    arrays = load_file(folder / "diffusion_pytorch_model.safetensors")
    model.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()})
    latents, target, text = cases.clip_values()
    heard = torch.from_numpy(text[None]).requires_grad_()
    time = torch.tensor([1000 * cases.TIME])
    output = model(torch.from_numpy(latents[None]), time, heard, return_dict=False)[0][0]
    loss = torch.mean((output - torch.from_numpy(target)) ** 2)
    loss.backward()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters()}
    table = cases.project_gradients(gradients)
    return output.detach().numpy(), loss.item(), heard.grad.numpy()[0], table


def named_shapes(name):
    """{name: shape} of the class of transformers for a published size, without values."""
    import torch
    import transformers

    map_, (_, cls) = cases.published_map(name), cases.PUBLISHED[name]
    config = transformers.AutoConfig.for_model(**dict(map_.config))
    with torch.device("meta"):
        model = getattr(transformers, cls)(config)
    return {map_.canonical(n): tuple(p.shape) for n, p in model.named_parameters()}


def make_arrays():
    """All arrays of the file, by name."""
    stored = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        for name, build in cases.MODELS.items():
            model = build()
            found = run_transformers(model, write_random_folder(Path(folder) / name, model))
            for key, array in zip(("logits", "largest", "gradients"), found, strict=True):
                stored[f"{name}/{key}"] = np.asarray(array, np.float32)
        keys = ("velocity", "loss", "text_gradient", "gradients")
        found = run_diffusers(Path(folder) / "wan")
        stored |= {f"wan/{k}": np.asarray(a, np.float32) for k, a in zip(keys, found, strict=True)}
        for kind in processors.SETTINGS:
            tokens, values = zip(*processors.published_values(kind), strict=True)
            rows = [cases.project(v.reshape(-1), kind) for v in values]
            stored[f"processors/{kind}/tokens"] = np.array(tokens, np.int32)
            stored[f"processors/{kind}/values"] = np.array([[*p, n] for p, n in rows], np.float32)
        for name in cases.PUBLISHED:
            stored[f"shapes/{name}"] = np.array(cases.digest(named_shapes(name)))
    return stored


def main():
    stored = make_arrays()
    np.savez_compressed(cases.FILE, **stored)
    print(f"{cases.FILE}: {cases.FILE.stat().st_size / 1e3:.0f} kB, {len(stored)} arrays")


if __name__ == "__main__":
    main()

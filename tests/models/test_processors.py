"""Processor files whose settings are all moved, against the published processors."""

from __future__ import annotations

import ast
import importlib
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dflop_jax.config import Config
from dflop_jax.data import MediaSpec
from dflop_jax.data.media.limits import Limits
from dflop_jax.data.media.tiling import IMAGE
from dflop_jax.preflight.derived_fields import with_settings
from dflop_jax.preflight.model_folder import factory_of, folder_settings
from dflop_jax.train.run_context import build_model
from models.processors import CLIPS, PICTURES, SOUNDS
from tests.data.media_cases import noise
from tests.front.made import HF_CONFIG

PX = 28  # of a tile
COLOURS = {"image_mean": [0.3, 0.4, 0.5], "image_std": [0.2, 0.3, 0.4], "rescale_factor": 1 / 200}
TEXT = HF_CONFIG["text_config"]
TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
         "intermediate_size": 64, "image_size": PX, "patch_size": 14}  # fmt: skip
PIL = {
    "qwen3_vl": ("qwen2_vl", "Qwen2VLImageProcessorPil"),
    "llava_onevision": ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil"),
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil"),
    "gemma4": ("gemma4", "Gemma4ImageProcessorPil"),
}
NATIVE = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
MOVED = {
    "qwen3_vl": {**COLOURS, **NATIVE, "size": {"shortest_edge": 700, "longest_edge": 5000}},
    "llava_onevision": {**COLOURS, "size": {"height": PX, "width": PX},
                        "image_grid_pinpoints": [[PX, 2 * PX], [2 * PX, PX], [3 * PX, 2 * PX]]},
    "internvl": {**COLOURS, "size": {"height": PX, "width": PX}, "max_patches": 5},
    "gemma3": {**COLOURS, "size": {"height": PX, "width": PX}},
    "gemma4": {**COLOURS, "do_normalize": True, "patch_size": 4, "max_soft_tokens": 140},
}  # fmt: skip
# What no family honours, and a value that no published class has by itself.
REFUSED = {"do_resize": False, "resample": 0}
OWN = {
    "qwen3_vl": {"merge_size": 4, "patch_size": 8, "temporal_patch_size": 1},
    "llava_onevision": {"do_pad": False, "size": {"height": 56, "width": 56}},
    "internvl": {"min_patches": 2, "size": {"height": 56, "width": 56}},
    "gemma3": {"size": {"height": 56, "width": 56}},
    "gemma4": {"patch_size": 8, "pooling_kernel_size": 4},
}


@pytest.fixture(scope="module")
def live():
    """What gives the published class of a family's pictures."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, not of what is tested
        pytest.importorskip("transformers")

        def load(kind):
            model, name = PIL[kind]
            module = f"transformers.models.{model}.image_processing_pil_{model}"
            return getattr(importlib.import_module(module), name)

        return load


def folder_of(tmp_path, kind, pictures, clips=None):
    """A folder of a model of a kind, with these settings of its processors."""
    import transformers

    if kind == "qwen3_vl":
        config = {"model_type": kind, **HF_CONFIG}
    else:
        vision = {"llava_onevision": "siglip_vision_model", "internvl": "internvl_vision",
                  "gemma3": "siglip_vision_model", "gemma4": "gemma4_vision"}[kind]  # fmt: skip
        text = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}.get(kind, "qwen2")
        sizes = {k: v for k, v in TEXT.items() if k != "rope_parameters"}
        tower = {**TOWER, "model_type": vision}
        sizes |= {"hidden_size_per_layer_input": 0} if kind == "gemma4" else {}
        if kind == "gemma4":
            tower |= {"patch_size": 4, "head_dim": 8, "num_key_value_heads": 4}
            tower |= {"pooling_kernel_size": 3, "position_embedding_size": 512}
        more = {"mm_tokens_per_image": 4} if kind == "gemma3" else {}
        made = transformers.AutoConfig.for_model(
            kind, text_config={**sizes, "model_type": text}, vision_config=tower, **more
        )
        config = json.loads(made.to_json_string(use_diff=False))
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
    if clips is not None:
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(clips))
    return tmp_path, config


def model_of(folder, config):
    factory = factory_of(config, folder)
    settings = folder_settings(folder, {"data.tokenizer"})
    ready = with_settings(Config(), [s for s in settings if s.name != "model.weights"])
    assert ready.model.factory == factory
    return build_model(ready.model), Limits.of(ready.data)


@pytest.mark.parametrize("kind", MOVED)
def test_pictures_are_those_of_the_published_processor(tmp_path, live, kind):
    """Fifty pictures: tokens and the numbers that the tower reads."""
    model, limits = model_of(*folder_of(tmp_path / kind, kind, MOVED[kind]))
    medium = MediaSpec.of(model.preprocessing, model.piece_tokens).prepared(limits)["vision"]
    settings = MOVED[kind] | ({"crop_to_patches": True} if kind == "internvl" else {})
    processor = live(kind)(**settings)
    processing = model.size.vision.processing
    rng = np.random.default_rng(1)
    for _ in range(50):
        width, height = (int(n) for n in rng.integers(12, 130, 2))
        picture = Image.fromarray(noise(height, width))
        header = dict.fromkeys(IMAGE.columns, 0) | {"width": width, "height": height}
        (counted,) = medium.count(
            "image", {k: np.array([v]) for k, v in header.items()}, np.array([True])
        ).tokens.tolist()
        decoded = medium.decode("image", lambda *_, p=picture: p, header, True)
        given = processor([picture], return_tensors="np")
        theirs = np.asarray(given["pixel_values"], np.float32)
        assert counted == len(decoded.ids)
        if kind in ("qwen3_vl", "gemma4"):
            mine = processing.normalised(decoded.fields["patches"], innermost=False)
            if kind == "qwen3_vl":
                assert counted == int(given["image_grid_thw"].prod()) // 4
            else:
                assert counted == int(given["num_soft_tokens_per_image"][0])
                theirs = by_blocks(theirs[0], given["image_position_ids"][0], 3) * 2 - 1
        else:
            mine = np.moveaxis(
                processing.normalised(decoded.fields["pixels"], innermost=True), -1, -3
            )
            theirs = theirs.reshape(-1, 3, PX, PX)
        np.testing.assert_allclose(mine, theirs, atol=2e-5)


def by_blocks(patches, places, merge):
    """A Gemma 4's patches (row, column, colour) block by block, as ours (colour, row, column)."""
    kept = places[:, 0] >= 0
    patches, (columns, rows) = patches[kept], places[kept].T
    order = np.lexsort((columns % merge, rows % merge, columns // merge, rows // merge))
    side = int((patches.shape[1] // 3) ** 0.5)
    split = patches[order].reshape(-1, side, side, 3)
    return split.transpose(0, 3, 1, 2).reshape(len(order), -1)


@pytest.mark.parametrize("kind", MOVED)
def test_what_is_not_honoured_is_refused_by_its_name(tmp_path, live, kind):
    for name, value in {**REFUSED, **OWN[kind]}.items():
        folder, config = folder_of(tmp_path / name, kind, MOVED[kind] | {name: value})
        with pytest.raises(ValueError, match=rf"preprocessor_config\.json: {name} .* not honoured"):
            model_of(folder, config)
    for clips, match in (
        ({**COLOURS, "rescale_factor": 0.1}, "differ from those"),
        ({"do_resize": False}, "do_resize"),
    ):
        if kind in CLIPS:
            fits = {k: v for k, v in MOVED[kind].items() if k != "size"} | OWN_CLIPS.get(kind, {})
            folder, config = folder_of(tmp_path / match[:4], kind, MOVED[kind], {**fits, **clips})
            with pytest.raises(ValueError, match=match):
                model_of(folder, config)


TILED = ("llava_onevision", "internvl")
OWN_CLIPS = {kind: {"size": {"height": PX, "width": PX}} for kind in TILED}


@pytest.mark.parametrize("kind", PICTURES)
def test_what_a_file_leaves_out_is_as_in_the_published_class(live, kind):
    usual = live(kind)().to_dict()
    for name, value in PICTURES[kind].items():
        if name == "image_grid_pinpoints":
            continue  # those of config.json, which is the same in published folders
        if name != "patch_size" or kind != "qwen3_vl":  # that of the tower is asked for
            assert plain(usual[name]) == plain(value), name


def plain(value):
    return list(value) if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("kind", CLIPS)
def test_clips_too_by_the_text_of_the_class(live, kind):
    """Without torchvision there is no class of clips but its source."""
    import transformers

    name = {"internvl": "internvl"}.get(kind, kind)
    file = Path(transformers.__file__).parent / f"models/{name}/video_processing_{name}.py"
    (made,) = [n for n in ast.parse(file.read_text()).body
               if isinstance(n, ast.ClassDef) and n.name.endswith("VideoProcessor")]  # fmt: skip
    stated = {}
    for line in made.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            target = line.targets[0] if isinstance(line, ast.Assign) else line.target
            try:
                stated[target.id] = eval(compile(ast.Expression(line.value), "", "eval"), {})
            except NameError:
                continue  # a constant from elsewhere
    same = [n for n in CLIPS[kind] if n in stated]
    assert len(same) >= 6
    assert {n: CLIPS[kind][n] for n in same} == {n: stated[n] for n in same}


def test_sounds_are_as_in_the_published_class(live):
    import transformers

    usual = transformers.WhisperFeatureExtractor().to_dict()
    assert {name: usual[name] for name in SOUNDS} == SOUNDS


def test_sounds_that_the_encoder_cannot_take_are_refused(tmp_path, live):
    import transformers

    audio = {"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 4, "d_model": 32,
             "encoder_ffn_dim": 64, "max_source_positions": 100}  # fmt: skip
    sizes = {k: v for k, v in TEXT.items() if k != "rope_parameters"}
    made = transformers.AutoConfig.for_model(
        "qwen2_audio", text_config={**sizes, "model_type": "qwen2"}, audio_config=audio
    )
    config = json.loads(made.to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(config))
    fits = {"feature_size": 16, "chunk_length": 4, "hop_length": 320, "n_fft": 512}
    for moved, match in (
        ({}, ""), ({"chunk_length": 30}, "give 1500 frames, the encoder takes 200"),
        ({"dither": 0.1}, "dither"), ({"feature_size": 80}, "feature_size"),
    ):  # fmt: skip
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**fits, **moved}))
        if match:
            with pytest.raises(ValueError, match=match):
                model_of(tmp_path, config)
            continue
        model, _ = model_of(tmp_path, config)
        facts = model.preprocessing["audio"]
        assert (facts["hop"], facts["n_fft"], facts["window_s"]) == (320, 512, 4.0)

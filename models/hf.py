"""Weight maps from transformers' checkpoints to our models: compositions, and their parts alone.

Maps of parts (`decoder_weights`, `tower_weights`) start a composition from separately published
weights; a tower's map leaves the connector out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from models import hf_config, hf_names, hf_sizes
from models.decoder import DecoderModule
from models.hf_tensors import HfTensor, HfUnused, HfWeightMap, Rule, tensors_of
from models.vit import VisionModule

ALIASES = (
    (r"^model\.(?!layers|embed_tokens|norm)", ""),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^language_model\.(?!model\.|lm_head\.)", "language_model.model."),
)
# (pattern, replacement): names of a checkpoint -> names in a loaded model.
LOADED_NAMES = (
    (r"^language_model\.model\.", "language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(?!lm_head\.)", "model."),
)
INV_FREQ = r".*rotary_emb\.inv_freq"


def _llm_tensors(module: DecoderModule, prefix: str) -> list[HfTensor]:
    body = tensors_of(module, "llm", hf_names.DECODER, f"{prefix}model.")
    return body + tensors_of(module, "llm", hf_names.HEAD, prefix)


def _tied_copies(module: DecoderModule, prefix: str) -> dict[str, str]:
    """Return the names of a tied head, which a file may contain or not."""
    names = {f"{prefix}lm_head.weight": f"{prefix}model.embed_tokens.weight"}
    return names if module.tied else {}


def _composed_weights(
    model: Any,
    encoder: str,
    encoder_rules: Sequence[Rule],
    connector_rules: Sequence[Rule],
    config: Mapping[str, Any],
) -> HfWeightMap:
    """Return the map of an encoder, a connector and a decoder."""
    module, llm, key = model.modules[encoder], model.modules["llm"], f"{encoder}_config"
    inner_kinds = {k: config[k]["model_type"] for k in (key, "text_config")}
    return HfWeightMap(
        tensors=(
            *tensors_of(module, encoder, encoder_rules, f"{encoder}_tower."),
            *tensors_of(module, encoder, connector_rules, "multi_modal_projector."),
            *_llm_tensors(llm, "language_model."),
        ),
        config=config,
        config_rules=hf_config.rules_for(config["model_type"], **inner_kinds),
        aliases=ALIASES,
        loaded_names=LOADED_NAMES,
        ignored=(INV_FREQ,),
        copies=_tied_copies(llm, "language_model."),
    )


def llava_onevision_weights(model: Any) -> HfWeightMap:
    size, norm = model.size, "vision_tower.post_layernorm"
    if size.layout != "anyres" or size.vision.post_norm:
        raise ValueError(
            "LLaVA-OneVision has no merged patches and no final norm of the tower; weights can be "
            "read and written for sizes such as llava-ov-7b"
        )
    config = {
        "model_type": "llava_onevision",
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "vision_config": hf_sizes.vision_config(size.vision),
        "text_config": hf_sizes.decoder_config(size.decoder),
        "tie_word_embeddings": size.decoder.tied,
    }
    rules = hf_names.SIGLIP, hf_names.MLP_CONNECTOR
    weights = _composed_weights(model, "vision", *rules, config)
    newline = tensors_of(model.modules["llm"], "llm", hf_names.NEWLINE, "")
    return replace(
        weights,
        tensors=(*weights.tensors, *newline),
        aliases=(*ALIASES, (r"^vision_tower\.vision_model\.", "vision_tower.")),
        ignored=(INV_FREQ, r"vision_tower\.post_layernorm\..*"),
        unused=(
            HfUnused(f"{norm}.weight", (size.vision.width,), 1.0),
            HfUnused(f"{norm}.bias", (size.vision.width,), 0.0),
        ),
    )


def internvl_weights(model: Any) -> HfWeightMap:
    """Return the map of InternVLForConditionalGeneration (the "-hf" folders)."""
    size = model.size
    config = {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "vision_config": hf_sizes.vision_config(size.vision),
        "text_config": hf_sizes.decoder_config(size.decoder, tie=False),
        "downsample_ratio": 1 / size.vision.merge,
        "image_seq_length": size.vision.tokens_per_tile,
        "tie_word_embeddings": size.decoder.tied,
    }
    rules = hf_names.INTERNVIT, hf_names.NORMED_MLP_CONNECTOR
    return _composed_weights(model, "vision", *rules, config)


def qwen2_audio_weights(model: Any) -> HfWeightMap:
    if model.modules["llm"].tied:
        raise ValueError("Qwen2-Audio's head is not tied; choose a decoder that is not tied")
    config = {
        "model_type": "qwen2_audio",
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "audio_config": hf_sizes.audio_config(model.size.audio),
        "text_config": hf_sizes.decoder_config(model.size.decoder),
    }
    rules = hf_names.WHISPER, hf_names.LINEAR_CONNECTOR
    return _composed_weights(model, "audio", *rules, config)


def qwen3_vl_weights(model: Any) -> HfWeightMap:
    """Return the map of Qwen3VLForConditionalGeneration."""
    vision, llm = model.modules["vision"], model.modules["llm"]
    size = model.size
    body, head = "model.language_model.", "lm_head.weight"
    rules = hf_config.rules_for(
        "qwen3_vl", vision_config="qwen3_vl_vision", text_config="qwen3_vl_text"
    )
    return HfWeightMap(
        tensors=(
            *tensors_of(
                vision, "vision", hf_names.qwen3_vl_tower(tuple(vision.taps)), "model.visual."
            ),
            *tensors_of(llm, "llm", hf_names.DECODER, body),
            *tensors_of(llm, "llm", hf_names.HEAD, ""),
        ),
        config={
            "model_type": "qwen3_vl",
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "vision_config": hf_sizes.qwen3_vl_vision_config(size.vision, size.decoder.width),
            "text_config": hf_sizes.qwen3_vl_text_config(size.decoder),
            "tie_word_embeddings": size.decoder.tied,
        },
        # Early folders give the tower the model_type of the whole model.
        config_rules=hf_config.drop_key(rules, "vision_config.model_type"),
        ignored=(INV_FREQ,),
        copies={head: f"{body}embed_tokens.weight"} if llm.tied else {},
    )


def decoder_weights(module: DecoderModule) -> HfWeightMap:
    """Return the map of Qwen2-, Qwen3- or LlamaForCausalLM for a module "llm" of any model."""
    config = hf_sizes.decoder_config(module.size)
    return HfWeightMap(
        tensors=tuple(_llm_tensors(module, "")),
        config=config,
        config_rules=hf_config.rules_for(config["model_type"]),
        aliases=((r"^(?=embed_tokens\.|layers\.|norm\.)", "model."),),
        ignored=(INV_FREQ,),
        copies=_tied_copies(module, ""),
    )


def tower_weights(module: VisionModule) -> HfWeightMap:
    """Return the map of SiglipVisionModel (or the tower in SiglipModel) or InternVLVisionModel for
    the module "vision" of any model. Layers after the model's last are ignored."""
    size = module.size
    intern = size.form == "internvit"
    config = hf_sizes.vision_config(size)
    layers = r"encoder\.layers?\.\d+\..*"
    norm: tuple[HfUnused, ...] = ()
    if not intern and not size.post_norm:
        norm = (
            HfUnused("post_layernorm.weight", (size.width,), 1.0),
            HfUnused("post_layernorm.bias", (size.width,), 0.0),
        )
    rules = hf_config.rules_for(config["model_type"], wrapper_kind=None if intern else "siglip")
    return HfWeightMap(
        tensors=tuple(
            tensors_of(module, "vision", hf_names.INTERNVIT if intern else hf_names.SIGLIP, "")
        ),
        config=config,
        config_rules=hf_config.drop_key(rules, "num_hidden_layers"),
        aliases=((r"^vision_model\.", ""),),
        ignored=(layers, r"head\..*", r"post_layernorm\..*", r"text_model\..*", r"logit_.*"),
        unused=norm,
    )

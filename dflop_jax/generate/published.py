"""Parameters of a folder of published weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dflop_jax.contract import MultimodalModel, Params
from dflop_jax.data.text.chat import AnyTokenizer, ChatTokenizer
from dflop_jax.data.text.tokenize import TokenRun, read_json
from dflop_jax.train.load_params import LoadedParams
from dflop_jax.weights import Folder, read_config, read_params

GENERATION = "generation_config.json"


def is_published(folder: str | Path) -> bool:
    """Whether a folder has a model as transformers writes it."""
    with suppress(ValueError):  # no folder, or none with a configuration
        return "model_type" in read_config(Path(folder))
    return False


def published_params(
    folder: str | Path, model: MultimodalModel, structs: Mapping[str, Params]
) -> LoadedParams:
    """Those of a folder that transformers wrote, laid out as `structs` say.

    Raises:
      ValueError: the folder does not hold this model.
    """
    weights: Any = getattr(model, "weights", None)
    if weights is None:
        raise ValueError(f"{folder}: a {type(model).__name__} has no published form; name a run")
    opened = Folder(folder, weights)
    opened.check()
    params = {m: read_params(opened, m, structs[m]) for m in model.modules}
    return LoadedParams(params, 0, Path(folder))


def end_token_ids(tokenizer: AnyTokenizer, run: str | Path) -> frozenset[int]:
    """Tokens that end an answer: the tokenizer's, the one that ends supervised answers, and every
    eos_token_id of the generation_config.json of the tokenizer's folder or of published weights."""
    ids = {tokenizer.im_end_id}
    folders = [Path(run)]
    if isinstance(tokenizer, ChatTokenizer):
        folders.append(tokenizer.folder)
        pieces: Sequence[TokenRun] = ()
        with suppress(ValueError):  # a template whose answers cannot be told apart
            pieces = tokenizer.encode_turns([("human", "?"), ("gpt", "!")])
        supervised = [i for p in pieces if p.supervised for i in p.ids]
        if supervised and not tokenizer.decode(supervised[-1:]):  # a special token, no text
            ids.add(supervised[-1])
    for folder in folders:
        eos_ids = read_json(folder / GENERATION).get("eos_token_id")
        ids.update(eos_ids if isinstance(eos_ids, list) else [] if eos_ids is None else [eos_ids])
    return frozenset(ids)

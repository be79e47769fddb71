"""What lies beside the tensors of a published folder: tokenizer, template and processors."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from dflop_jax.weights.folder import CONFIG

_TEXT = ("*.json", "*.txt", "*.model", "*.jinja")
_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json",
               "processor_config.json")  # fmt: skip
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")  # what one of these folders has


def copy_beside(target: Path, folders: Iterable[Path]) -> None:
    """Copy what tells how to prepare a model's inputs from the folders that its parts came from:
    each processor's file from the first that has it, all else from the first with a tokenizer."""
    there = [folder for folder in folders if folder.is_dir()]
    text = next((f for f in there if any(any(f.glob(t)) for t in _TOKENIZERS)), None)
    for folder in there[:1] if text is None else [text]:
        for found in (f for pattern in _TEXT for f in folder.glob(pattern)):
            ours = found.name == CONFIG or found.name.endswith(".index.json")
            if not ours and found.name not in _PROCESSORS:
                shutil.copyfile(found, target / found.name)
    for name in _PROCESSORS:
        if file := next((f / name for f in there if (f / name).is_file()), None):
            shutil.copyfile(file, target / name)

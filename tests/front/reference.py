"""What transformers makes of a folder of a Qwen3-VL: for the cases of ../shared/data/reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.verify.folders import load


class Reference:
    """The folder's model on the CPU in float32; `place` is the id of a token of a picture."""

    def __init__(self, folder: Path) -> None:
        hf, self.torch = load("transformers"), load("torch")
        (name,) = json.loads((folder / "config.json").read_text())["architectures"]
        self.model = getattr(hf, name).from_pretrained(
            folder, dtype=self.torch.float32, attn_implementation="eager"
        )
        tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(str(folder))
        self.place = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self.model.config.image_token_id = self.place

    def _logits(self, ids: Any, given: Mapping[str, Any]) -> Any:
        types = (ids == self.place).int()
        with self.torch.no_grad():
            return self.model(input_ids=ids, mm_token_type_ids=types, **given).logits[0]

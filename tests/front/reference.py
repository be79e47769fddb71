"""What transformers' own tokenizer, template, picture processor and model make of records: their
loss, their likeliest answer."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.front.published import FAMILIES, transformers

IMAGE = "<image>"  # of records and prompts
ROLES = {"human": "user", "gpt": "assistant"}


class Reference:
    """A folder of one of `FAMILIES` as transformers has it, on the CPU in float32."""

    def __init__(self, folder: Path) -> None:
        hf, self.torch = transformers(), importlib.import_module("torch")
        about = json.loads((folder / "config.json").read_text())
        self.folder, self.family = folder, FAMILIES[about["model_type"]]
        self.tokenizer = hf.PreTrainedTokenizerFast.from_pretrained(str(folder))
        self.model = getattr(hf, about["architectures"][0]).from_pretrained(
            folder, dtype=self.torch.float32, attn_implementation="eager"
        )
        token = self.family.token
        self.place = self.tokenizer.convert_tokens_to_ids(token) if token else -1
        self.model.config.image_token_id = self.place

    def loss(self, records: Sequence[Mapping[str, Any]], media: Path) -> float:
        """The mean loss of all answer tokens of records, whose pictures lie in a folder."""
        total, count = 0.0, 0
        for record in records:
            chat = [_message(ROLES[t["from"]], t["value"]) for t in record["conversations"]]
            pictures = [media / name for name in record.get("image", ())]
            text, given = self._rendered(chat, pictures, add_generation_prompt=False)
            encoded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
            ids = self.torch.tensor(encoded["input_ids"])[None]
            spans = [m.span(1) for m in re.finditer(self.family.answer, text, re.DOTALL)]
            begins = [begin for begin, _ in encoded["offset_mapping"]]
            answer = np.array([any(a <= b < z for a, z in spans) for b in begins])
            losses = self.torch.nn.functional.cross_entropy(
                self._logits(ids, given)[:-1], ids[0, 1:], reduction="none"
            ).numpy()
            total += float(losses[answer[1:]].sum())
            count += int(answer[1:].sum())
        return total / count

    def greedy(self, question: str, pictures: Sequence[Path], tokens: int) -> list[int]:
        """The likeliest next tokens one by one, each of a pass over all before it."""
        chat = [_message("user", question)]
        text, given = self._rendered(chat, pictures, add_generation_prompt=True)
        ids = self.torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])[None]
        said: list[int] = []
        while len(said) < tokens:
            best = int(self._logits(ids, given)[-1].argmax())
            if best == self.tokenizer.eos_token_id:
                break
            said.append(best)
            ids = self.torch.cat([ids, self.torch.tensor([[best]])], dim=1)
        return said

    def _rendered(
        self, chat: Any, pictures: Sequence[Path], *, add_generation_prompt: bool
    ) -> tuple[str, dict[str, Any]]:
        """A chat as text with a token of a picture as often as it has tokens, and what the model is
        given of the pictures."""
        text = self.tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        if not pictures:
            return text, {}
        images = [Image.open(path).convert("RGB") for path in pictures]
        given, sizes = self.family.pictures(self.folder, self.tokenizer, text, images)
        begin, end = self.family.framed
        first, *rest = text.split(self.family.written)
        each = zip(sizes, rest, strict=True)
        return first + "".join(begin + n * self.family.token + end + r for n, r in each), given

    def _logits(self, ids: Any, given: Mapping[str, Any]) -> Any:
        own = {self.family.types: (ids == self.place).int()} if self.family.types else {}
        with self.torch.no_grad():
            return self.model(input_ids=ids, **own, **given).logits[0]


def _message(role: str, text: str) -> dict[str, Any]:
    """A message, with parts where it has pictures."""
    content = [
        {"type": "image"} if part == IMAGE else {"type": "text", "text": part}
        for part in re.split(f"({IMAGE})", text)
        if part
    ]
    alone = len(content) == 1 and content[0]["type"] == "text"
    return {"role": role, "content": content[0]["text"] if alone else content}

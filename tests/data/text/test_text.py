"""Tokenizers give the text back; the template supervises answers only."""

import pytest

from dflop_jax.data.build import open_tokenizer
from dflop_jax.data.text.tokenize import FileTokenizer, encode_chatml
from tests.data.text.test_chat import write

TEXTS = ["", "a", "What colour?", "héé 漢字 🙂", "<|im_start|>user", "<|im_end|>", "a\nb"]
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|endoftext|>")


@pytest.fixture(params=["byte", "file"])
def tokenizer(request, tmp_path):
    file = write(tmp_path, special=SPECIALS) / "tokenizer.json"
    return open_tokenizer("" if request.param == "byte" else str(file), 512)


def test_round_trip_and_no_special_token_from_plain_text(tokenizer):
    t = tokenizer
    special = {t.pad_id, t.im_start_id, t.im_end_id, t.placeholder_id}
    assert len(special) == 4
    assert max(special) < t.vocab_size
    for text in TEXTS:
        ids = t.encode(text)
        assert not special & set(ids)
        assert t.decode(ids) == t.decode([t.im_start_id, *ids, t.im_end_id]) == text


def test_template(tokenizer):
    turns = [("system", "S"), ("human", "<image>\nA <video> b"), ("gpt", "yes"), ("human", "c"),
             ("gpt", "no")]  # fmt: skip
    names = {tokenizer.im_start_id: "(", tokenizer.im_end_id: ")"}
    runs = [
        ("".join(names.get(i) or tokenizer.decode([i]) for i in p.ids) or f"[{p.medium}]", p)
        for p in encode_chatml(turns, tokenizer)
    ]
    assert "".join(text for text, _ in runs) == (
        "(system\nS)\n(user\n[0]\nA [1] b)\n(assistant\nyes)\n(user\nc)\n(assistant\nno)"
    )
    assert "".join(text for text, p in runs if p.supervised) == "yes)no)"


def test_unusable_tokenizers(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    for name, why in (("none.json", "no such tokenizer"), ("bad.json", "not a tokenizer")):
        with pytest.raises(ValueError, match=why):
            open_tokenizer(str(tmp_path / name), None)
    for missing in SPECIALS:
        folder = write(tmp_path, special=[s for s in SPECIALS if s != missing])
        with pytest.raises(ValueError, match=r"lacks .*added_tokens"):
            FileTokenizer(folder / "tokenizer.json")
    with pytest.raises(ValueError, match="vocabulary 100"):
        open_tokenizer("", 100)

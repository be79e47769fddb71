"""Tokenizers give the text back; the template supervises answers only."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from dflop_jax.data.build import open_tokenizer
from dflop_jax.data.text.tokenize import FileTokenizer, encode_chatml

TEXTS = ["", "a", "What colour?", "héé 漢字 🙂", "<|im_start|>user", "<|im_end|>", "a\nb"]
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|endoftext|>")


def write_tokenizer(path, specials):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=["byte", "file"])
def tokenizer(request, tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", SPECIALS)
    return open_tokenizer("" if request.param == "byte" else str(path), 512)


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
        path = write_tokenizer(tmp_path / "t.json", [s for s in SPECIALS if s != missing])
        with pytest.raises(ValueError, match=r"lacks .*added_tokens"):
            FileTokenizer(path)
    with pytest.raises(ValueError, match="vocabulary 100"):
        open_tokenizer("", 100)

"""Tokenizers give the text back; the template supervises answers only."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from dflop_jax.data.build import open_tokenizer
from dflop_jax.data.text.tokenize import ByteTokenizer, FileTokenizer, encode_chatml

TEXTS = ["", "a", "What colour?", "héé 漢字 🙂", "<|im_start|>user", "<|im_end|>", "a\nb"]


def write_tokenizer(path, specials):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(alphabet))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(path))
    return path


SPECIALS = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|endoftext|>")


@pytest.fixture(params=["byte", "file"])
def tokenizer(request, tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", SPECIALS)
    return open_tokenizer("" if request.param == "byte" else str(path), 512)


def test_round_trip_and_no_special_token_from_plain_text(tokenizer):
    special = {
        tokenizer.pad_id,
        tokenizer.im_start_id,
        tokenizer.im_end_id,
        tokenizer.placeholder_id,
    }
    assert len(special) == 4
    assert max(special) < tokenizer.vocab_size
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert not special & set(ids)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.im_start_id, *ids, tokenizer.im_end_id]) == text


def test_template(tokenizer):
    turns = [("system", "S"), ("human", "<image>\nA <video> b"), ("gpt", "yes"), ("human", "c"),
             ("gpt", "no")]  # fmt: skip
    spelled, supervised = "", ""
    for p in encode_chatml(turns, tokenizer):
        if p.medium >= 0:
            spelled += f"[{p.medium}]"
            continue
        names = {tokenizer.im_start_id: "(", tokenizer.im_end_id: ")"}
        for i in p.ids:
            piece = names.get(i) or tokenizer.decode([i])
            spelled += piece
            supervised += piece if p.supervised else ""
    assert spelled == (
        "(system\nS)\n(user\n[0]\nA [1] b)\n(assistant\nyes)\n(user\nc)\n(assistant\nno)"
    )
    assert supervised == "yes)no)"


def test_unusable_tokenizers(tmp_path):
    with pytest.raises(ValueError, match="no such tokenizer"):
        open_tokenizer(str(tmp_path / "none.json"), None)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        open_tokenizer(str(tmp_path / "bad.json"), None)
    for missing in SPECIALS:
        path = write_tokenizer(tmp_path / "t.json", [s for s in SPECIALS if s != missing])
        with pytest.raises(ValueError, match=r"lacks .*added_tokens"):
            FileTokenizer(path)
    with pytest.raises(ValueError, match="vocabulary 100"):
        open_tokenizer("", 100)
    assert ByteTokenizer.vocab_size <= 512

"""Chat templates against `transformers`, with tokenizers made here in the published form."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import check_embedding
from tests.verify.folders import load

CHATML = """{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MARKED = """{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' %}
A: {% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}

{% else %}
{{ message.role | upper }}: {{ message.content | tojson }}

{% endif %}
{% if loop.index > 90 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}A: {% endif %}"""
# as LLaVA-OneVision's: media first, then the text of a message
PARTS = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}
{%- if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for kind in ['image', 'video'] %}
{%- for c in message['content'] | selectattr('type', 'equalto', kind) %}
{{- '<' + kind + '>\\n' }}{% endfor %}{% endfor %}
{%- for c in message['content'] | selectattr('type', 'equalto', 'text') %}
{{- c['text'] }}{% endfor %}{% endif %}
{{- '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>", "<|AUDIO|>"]
CHATS = [
    [("human", "Hi"), ("gpt", "Hello there.")],
    [("system", "Be brief."), ("human", "Ünï 日本 😀\n\n two"), ("gpt", " räksmörgås 😀"),
     ("human", "More?"), ("gpt", "No\n")],
    [("human", 'He said "x < y" & \'z\''), ("gpt", "a"), ("human", ""), ("gpt", "b")],
]  # fmt: skip


def write(folder, template=CHATML, config=None, special=SPECIAL, file="tokenizer_config.json"):
    """A byte-level BPE tokenizer folder."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    words = ["Hello there. The quick brown fox is helpful. assistant user system"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, **(config or {})}
    if file == "tokenizer_config.json":
        config["chat_template"] = template
    else:
        (folder / file).write_text(
            template if file.endswith("jinja") else json.dumps({"chat_template": template})
        )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def messages(turns):
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    return [{"role": roles[role], "content": text} for role, text in turns]


@pytest.fixture(scope="module")
def published():
    tokenizer = load("transformers").PreTrainedTokenizerFast
    return lambda folder: tokenizer.from_pretrained(str(folder))


def said(chat, pieces):
    """The texts that are trained on."""
    return [chat.decode_with_special(p.ids) for p in pieces if p.supervised]


@pytest.mark.parametrize("turns", CHATS)
@pytest.mark.parametrize("template", [CHATML, MARKED, PARTS], ids=["chatml", "marked", "parts"])
def test_ids_are_those_of_transformers(tmp_path, published, template, turns):
    folder, marked = write(tmp_path, template), template is MARKED
    chat = ChatTokenizer(folder)
    ids, answers = chat.encode_chat(messages(turns))
    out = published(folder).apply_chat_template(
        messages(turns), return_dict=True, return_assistant_tokens_mask=marked
    )
    assert ids.tolist() == out["input_ids"]
    if marked:
        assert (answers != 0).astype(int).tolist() == out["assistant_masks"]
    pieces = chat.encode_turns(turns)
    assert [i for p in pieces for i in p.ids] == ids.tolist()
    answers = [f"{text}<|im_end|>" for role, text in turns if role == "gpt"]
    assert marked or said(chat, pieces) == answers


def test_media_go_where_the_template_puts_them(tmp_path):
    turns = [("human", "See <video> and <image>, <image>!"), ("gpt", "ok"),
             ("human", "<image>?"), ("gpt", "yes")]  # fmt: skip
    in_place = ChatTokenizer(write(tmp_path / "a")).encode_turns(turns)
    assert [p.medium for p in in_place if p.medium >= 0] == [0, 1, 2, 3]
    chat = ChatTokenizer(write(tmp_path / "b", PARTS))
    first = chat.encode_turns(turns)
    assert [p.medium for p in first if p.medium >= 0] == [1, 2, 0, 3]
    last = first[[p.medium for p in first].index(3) :]
    assert "".join(chat.decode(p.ids) for p in last) == "\n?assistant yes"


GEMMA = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}
{% if c.type == 'image' %}PICTURE{% else %}{{ c.text | trim }}{% endif %}{% endfor %}{% endif %}
<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


FRAMED = {"<start>": "\n\n<start><soft><end>\n\n", "<soft>": "<start><soft><end>"}


@pytest.mark.parametrize("written, framed", FRAMED.items(), ids=["gemma3", "gemma4"])
def test_pictures_of_gemma_are_framed(tmp_path, written, framed):
    names = {"boi_token": "<start>", "image_token": "<soft>", "eoi_token": "<end>"}
    template = GEMMA.replace("PICTURE", written)
    folder = write(tmp_path, template, config=names, special=[*SPECIAL, *names.values()])
    chat = ChatTokenizer(folder)
    turns = [("human", "<image>What?"), ("gpt", "It."), ("human", "<image>"), ("gpt", "That.")]
    pieces = chat.encode_turns(turns)
    spelled = [chat.decode_with_special(p.ids) or "<soft>" for p in pieces]
    assert "".join(spelled).count(framed) == 2
    assert [p.medium for p in pieces if p.medium >= 0] == [0, 1]
    assert said(chat, pieces) == ["It.<|im_end|>", "That.<|im_end|>"]
    text = chat.encode_turns([("human", "a <start> b"), ("gpt", "c")])  # spelled, no picture
    assert chat.ids_of("<start>")[0] not in [i for p in text for i in p.ids]


@pytest.mark.parametrize("template", [CHATML, PARTS], ids=["chatml", "parts"])
@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>system\n", "<|AUDIO|>", "<|x|>"])
def test_text_cannot_spell_a_special_token(tmp_path, template, text):
    chat = ChatTokenizer(write(tmp_path, template))
    plain, other = (chat.encode_turns([("human", "<image>" + t), ("gpt", t)]) for t in ("q", text))
    special = {chat._tokenizer.token_to_id(t) for t in SPECIAL}
    found, wanted = ([[i for i in p.ids if i in special] for p in runs] for runs in (other, plain))
    assert found == wanted
    assert chat.decode([i for p in other if p.supervised for i in p.ids]) == text


ADDED = {"__type": "AddedToken", "special": True}
BAD = {
    "no chat template": lambda f: write(f, None),
    "not valid jinja": lambda f: write(f, "{% for"),
    "'<eos>', which": lambda f: write(f, config={"eos_token": "<eos>"}),
    "'<p>', which": lambda f: write(f, config={"pad_token": {**ADDED, "content": "<p>"}}),
    "'<z>', which": lambda f: write(
        f, config={"additional_special_tokens": ["<image>", {**ADDED, "content": "<z>"}]}
    ),
    "tokenizer cannot be read": lambda f: (write(f) / "tokenizer_config.json").write_text("[1"),
    "be read": lambda f: (write(f) / "tokenizer.json").write_text("{}"),
    "no such file": lambda f: (write(f) / "tokenizer.json").unlink(),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_folder_is_one_line(tmp_path, reason):
    BAD[reason](tmp_path)
    with pytest.raises(ValueError, match=reason) as caught:
        ChatTokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


ANSWERS_ALONE = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
REFUSED = {
    "writes <|start|>": "{{ '<|start|>' }}",
    "fails .TemplateError: roles": "{{ raise_exception('roles') }}",
    "fails .*no attribute": "{{ messages[0].content.none.none }}",
    "fails .*unsafe": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "fails .*division": "{{ 1 / 0 }}",
    "changes earlier text": "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "leaves out media": ANSWERS_ALONE,
    "leaves out text of the user": ANSWERS_ALONE,
    "repeats a medium": "{% for m in messages %}{{ m.content + m.content }}{% endfor %}",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_bad_template_is_one_line(tmp_path, reason):
    chat = ChatTokenizer(write(tmp_path, REFUSED[reason]))
    turns = [("human", "<image>" if "medi" in reason else "q"), ("gpt", "a")]
    with pytest.raises(ValueError, match=reason.replace("|", r"\|")) as caught:
        chat.encode_turns(turns)
    assert "\n" not in str(caught.value)


def test_a_medium_without_a_token(tmp_path):
    chat = ChatTokenizer(write(tmp_path, special=SPECIAL[:3]))
    for question, why in (("<video>", "no token stands for video"), ("\ufdd0", r"U\+FDD0")):
        with pytest.raises(ValueError, match=why):
            chat.encode_turns([("human", question), ("gpt", "a")])


def test_embedding_sizes(tmp_path):
    size = ChatTokenizer(write(tmp_path)).vocab_size
    with pytest.raises(ValueError, match=f"has {size} ids, the model's embedding {size - 1}"):
        ChatTokenizer(tmp_path, embedding_size=size - 1)
    for ids, rows in [(151665, 151936), (151665, 152064), (128256, 128256)]:  # Qwen2.5, Llama 3
        check_embedding(ids, rows, "a")
    with pytest.raises(ValueError, match="of this model"):
        check_embedding(50257, 151936, "a")


def test_answers_need_not_begin_with_the_thought_of_their_prompt(tmp_path):
    template = CHATML.replace("assistant\\n' }}", "assistant\\n<think>\\n\\n</think>\\n\\n' }}")
    assert template != CHATML
    chat = ChatTokenizer(write(tmp_path, template))
    turns = [("human", "2+2?"), ("gpt", "4"), ("human", "Sure?"), ("gpt", "Yes")]
    assert said(chat, chat.encode_turns(turns)) == ["4<|im_end|>", "Yes<|im_end|>"]


def test_the_processors_template_goes_before_the_tokenizers(tmp_path):
    folder = write(tmp_path, CHATML)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    assert ChatTokenizer(folder).template == PARTS
    (folder / "chat_template.jinja").write_text(MARKED)
    assert ChatTokenizer(folder).template == PARTS  # as transformers has it
    (folder / "chat_template.json").unlink()
    assert ChatTokenizer(folder).template == MARKED
    named = write(tmp_path / "named", [{"name": "default", "template": CHATML}])
    assert ChatTokenizer(named).template == CHATML

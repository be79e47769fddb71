"""Records of the shapes that public datasets have, rendered as `transformers` renders them; ChatML
and tokenizers without a template."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from dflop_jax.config import DataConfig
from dflop_jax.data import MediaSpec, make_source
from dflop_jax.data.build import open_tokenizer
from dflop_jax.data.datasets.record_parser import parse_record
from dflop_jax.data.text.chat import ChatTokenizer
from dflop_jax.data.text.tokenize import FileTokenizer, encode_chatml, weight_runs
from tests.data.text.test_chat import published as theirs  # noqa: F401 (a fixture)
from tests.data.text.test_chat import said, write

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"]
BODY = """{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}
{%- if c.type == 'text' %}{{ c.text }}{% else %}{{ '<' + c.type + '>' }}{% endif %}
{%- endfor %}{% endif %}"""
PARTS_BODY = """{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% else %}
{{- '<' + c.type + '>' }}{% endif %}{% endfor %}"""
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
HEAD = """{%- if tools is not none %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}
{%- endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"""
CALLS = "{% for t in m.tool_calls or [] %}{{ '\n<call>' + (t | tojson) + '</call>' }}{% endfor %}"
END = "{{ '<|im_end|>\n' }}{% endfor %}"
LAST = """{%- set last = namespace(user=-1) %}{% for m in messages if m.role == 'user' %}
{%- set last.user = messages.index(m) %}{% endfor %}"""
THOUGHT = """{% if m.reasoning_content and loop.index0 > last.user %}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}"""
TEMPLATES = {
    "either": HEAD + BODY + CALLS + END + PROMPT,
    "parts only": HEAD + PARTS_BODY + END + PROMPT,
    "strings only": HEAD + "{{ m.content + '' }}" + END + PROMPT,
    "thinking": LAST + HEAD + THOUGHT + BODY + CALLS + END + (
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is "
        "defined and not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"
    ),
    "generation marks": HEAD + "{% if m.role == 'assistant' %}{% generation %}" + BODY
    + "{% endgeneration %}{% else %}" + BODY + "{% endif %}" + END + PROMPT,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bern <b>"}}}
PICTURE, CLIP = {"type": "image", "image": "a.png"}, {"type": "video", "video": "b.mp4"}


def ask(*content):
    words = content[0] if isinstance(content[0], str) else list(content)
    return {"role": "user", "content": words}


def say(content, **more):
    return {"role": "assistant", "content": content, **more}


def text(words):
    return {"type": "text", "text": words}


TALK = [ask("Hi <b>"), say("Ho & 'so'"), ask("Räksmörgås? 日本 😀"), say(" Yes.\n")]
SHAPES = {
    "one turn": {"messages": TALK[:2]},
    "turns": {"messages": TALK},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, *TALK]},
    "system in parts": {"messages": [{"role": "system", "content": [text("Be brief.")]}, *TALK]},
    "parts": {"messages": [ask(text("What "), text("now?")), say([text("This.")])]},
    "picture": {"messages": [ask(PICTURE, text("What?")), say("It.")]},
    "media in the middle": {"messages": [
        *TALK[:2], ask(text("See "), PICTURE, text(" and "), CLIP, text("?")), say("Both."),
        ask("Sure?"), say("Yes."),
    ]},
    "two pictures": {"messages": [ask(PICTURE, PICTURE, text("Same?")), say("No.")]},
    "thought": {"messages": [ask("2+2?"), say("4", reasoning_content="Two and two.")]},
    "thoughts": {"messages": [
        ask("2+2?"), say("4", reasoning_content="First."), ask("3+3?"),
        say("6", reasoning_content="Second."),
    ]},
    "tools": {"tools": [TOOL], "messages": [ask("Rain?"), say("I look.", tool_calls=[CALL])]},
    "tool turns": {"tools": [TOOL], "messages": [
        ask("Rain?"), say("Look.", tool_calls=[CALL]), {"role": "tool", "content": "dry"},
        say("No rain."),
    ]},
    "tools as text": {"tools": '[{"name": "a"}]', "messages": TALK[:2]},
    "no thinking": {"chat_template_kwargs": {"enable_thinking": False}, "messages": TALK[:2]},
    "thinking off": {"enable_thinking": False, "messages": TALK},
    "spelled": {"messages": [ask("Say <|im_start|>!"), say("<|im_end|> it is")]},
    "html": {"messages": [ask(text("What is <video>?")), say("A tag.")]},
    "spaces": {"messages": [ask("  a\n\n"), say("\tb  ")]},
    "empty question": {"messages": [ask(PICTURE, text("")), say("A cat.")]},
    "weights": {"messages": [TALK[0], say("bad", loss=False), ask("Again"), say("good")]},
}  # fmt: skip


def messages_for(template, raw):
    """A record's messages as a user of transformers writes them for a template: parts, or texts."""
    found = []
    for message in raw["messages"]:
        content = message["content"]
        if template == "parts only" and isinstance(content, str):
            content = [text(content)]
        elif template == "strings only" and not isinstance(content, str):
            content = "".join(p.get("text", f"<{p['type']}>") for p in content)
        found.append({**message, "content": content})
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_text_is_that_of_transformers(tmp_path, theirs, template, shape):
    raw = SHAPES[shape]
    folder = write(tmp_path, TEMPLATES[template], special=SPECIAL)
    chat = ChatTokenizer(folder)
    record = parse_record("d[0]", raw, lambda name: tmp_path / name)
    tools = [{"name": "a"}] if shape == "tools as text" else raw.get("tools")
    options = raw.get("chat_template_kwargs", {k: raw[k] for k in ("enable_thinking",) if k in raw})
    expected = theirs(folder).apply_chat_template(
        messages_for(template, raw), tools=tools, tokenize=False, **options
    )
    runs = chat.encode_turns(record.turns, record.fields)
    pieces = weight_runs(runs, record.weights, prompts=False)
    shown = "".join("#" if p.medium >= 0 else chat.decode_with_special(p.ids) for p in pieces)
    if shape != "html":
        expected = re.sub("<image>|<video>", "#", expected)
    assert shown == expected
    supervised = "".join(
        chat.decode_with_special(p.ids) for p in pieces if p.supervised and p.weight
    )
    last = raw["messages"][-1]["content"]
    last = last if isinstance(last, str) else last[0]["text"]
    assert supervised.rstrip("\n").endswith("<|im_end|>")
    assert last in supervised
    assert "bad" not in supervised
    assert not any(t["content"] in supervised for t in raw["messages"] if t["role"] == "tool")


def test_answers_that_lose_their_thinking_are_not_supervised(tmp_path, caplog):
    chat = ChatTokenizer(write(tmp_path, TEMPLATES["thinking"], special=SPECIAL))
    record = parse_record("d[0]", SHAPES["thoughts"], lambda name: tmp_path / name)
    for _ in range(2):
        pieces = chat.encode_turns(record.turns, record.fields)
        assert said(chat, pieces) == ["<think>\nSecond.\n</think>\n6<|im_end|>"]
        (weighted,) = (p for p in weight_runs(pieces, (0.5, 0.25), prompts=False) if p.supervised)
        assert weighted.weight == 0.25  # of the second answer
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "only the last answer" in caplog.text


def test_processes_that_read_records_do_not_import_transformers(tmp_path, caplog):
    folder = write(tmp_path / "t", TEMPLATES["either"], special=SPECIAL)
    (tmp_path / "d.json").write_text(json.dumps([SHAPES["tools"]]))
    config = DataConfig(path=str(tmp_path / "d.json"), tokenizer=str(folder))
    spec = MediaSpec.of({}, {})
    source = make_source(config, spec, index_dir=tmp_path, in_processes=False)
    assert "not read" not in caplog.text  # the template asks for tools and tool_calls
    program = (
        "import json, sys\nfrom dflop_jax.data.build import open_row_reader, open_source\n"
        "arguments = json.load(sys.stdin)\n"
        "open_row_reader({'dataset': arguments, 'decoded': False})\n"
        "print(open_source(arguments).sample(0).fields['llm']['tokens'].tolist())\n"
        "assert 'transformers' not in sys.modules"
    )
    arguments = json.dumps(source.factory.arguments)
    run = subprocess.run(
        [sys.executable, "-c", program], input=arguments, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == source.sample(0).fields["llm"]["tokens"].tolist()


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

"""Every record that cannot be used is refused in one line that names it and the reason."""

from __future__ import annotations

import pytest

from dflop_jax.data.datasets.blob import MediaRoots
from dflop_jax.data.datasets.record_parser import parse_record
from tests.data.media_cases import talk

ONE_PICTURE = talk("<image>", "a")


def ask(content, answer="a", **more):
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def tell(**more):
    """A record of LLaVA's format with one picture."""
    return {"conversations": ONE_PICTURE, "image": "a.png", **more}


def text(value):
    return {"type": "text", "text": value}


def image(value):
    return {"type": "image", "image": value}


# fmt: off
UNUSABLE = [
    # messages
    (ask(None), r"message 0 \(of user\) has no content"),
    (ask([]), "message 0 .* has no content"),
    (ask("q", ""), "message 1 .* has no content"),
    ({"messages": [{"role": "user"}]}, "has no content"),
    ({"messages": []}, "no conversations or messages"),
    ({"messages": "{"}, "not JSON"),
    ({"messages": ["hi"]}, "message 0 is not"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "from 'critic', not user"),
    ({"messages": ask("q")["messages"][:1]}, "do not alternate"),
    (ask("<image> q"), "1 <image> tags for 0 images"),
    (ask("q", images=["a.png"]), "0 <image> tags for 1 images"),
    (ask([{"type": "image"}, text("q")]), "1 <image> tags for 0 images"),
    (ask([image("a.png")], images=["b.png"]), "0 <image> tags for 1"),
    (ask([image("z.png")]), "missing file"),
    (ask([image("../z.png")]), "leads out"),
    (ask([{"type": "image_url", "image_url": "https://a.b/c.png"}]), "is not here; fetch it"),
    (ask([image("data:,%")]), "is not base64"),
    (ask([image(3)]), "is not a path or bytes"),
    (ask([{"type": "table"}]), "has a part .*'table'.*, not a text, image, video, audio"),
    (ask([text("<ima"), text("ge>")], image="a.png"), "spells a tag across its parts"),
    # conversations
    (tell(conversations=[]), "no conversations"),
    (tell(conversations=["hello"]), "not {from, value}"),
    (tell(conversations=1), "no conversations"),
    (tell(conversations=[[]] * 2000), "more than 1000 turns"),
    (tell(conversations=ONE_PICTURE[::-1]), "not human"),
    (tell(conversations=talk("<image>", " ")), "answer is empty"),
    (tell(conversations=talk("<image>", "a", "b")), "up to an answer"),
    (tell(conversations=[{"from": "robot", "value": "a"}]), "from 'robot'"),
    (tell(conversations=[{"from": ["human"], "value": "a"}]), "not human, gpt"),
    (tell(conversations=talk("<\ufdd2image>", "x")), r"U\+FDD2"),
    (tell(conversations=talk("<image><image>", "a")), "2 <image> tags for 1 images"),
    (tell(conversations=talk("no tag", "a")), "0 <image> tags for 1 images"),
    (tell(image=None), "1 <image> tags for 0 images"),
    (tell(image=5), "not a path or bytes"),
    (tell(image=["a.png"] * 2000), "more than 1000 media"),
    (tell(id="x" * 10_000, conversations=[]), "no conversations"),
    # weights
    (tell(weight=-1), "the weight of the record is -1, not a number"),
    (tell(conversations=[ONE_PICTURE[0], {**ONE_PICTURE[1], "weight": "much"}]), "of turn 1 is 'm"),
    (tell(conversations=[{**ONE_PICTURE[0], "weight": 1}, ONE_PICTURE[1]]), "turn 0 has a weight"),
    *(({"conversations": [{**t, "loss": v} for t in talk("Hi", "Bad")]}, "loss of turn 0 is .*;")
      for v in ("no", "", 2, [])),
    # questions
    ({"question": "  ", "answer": "x"}, "its question is no text"),
    ({"question": "Which <image 2>?", "answer": "x", "image_1": "a.png"}, "names <image 2>"),
    ({"question": "?", "answer": "Z", "options": "['a', 'b']"}, "'Z' is none of its 2 choices"),
    ({"question": "?", "answer": "A", "options": "a, b"}, "its choices are no list"),
    ({"question": "?", "answer": "A", "options": "__import__('os')"}, "its choices are no list"),
    ({"question": "<image>?", "answer": "A"}, "1 <image> tags for 0 images"),
    # fields beside them
    (ask("q", system=3), "not text"),
    (ask("q", tools="{"), "JSON"),
    (ask("q", chat_template_kwargs="[]"), "no object"),
]
# fmt: on


@pytest.mark.parametrize("raw, reason", UNUSABLE)
def test_an_unusable_record_is_refused_in_one_line(tmp_path, raw, reason):
    (tmp_path / "a.png").write_bytes(b"a")
    with pytest.raises(ValueError, match=rf"^d\.json\[3\].*{reason}") as error:
        parse_record("d.json[3]", raw, MediaRoots([tmp_path]).resolve)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500

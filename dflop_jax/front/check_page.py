"""The page of `dflop check`: one file that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

import numpy as np

from dflop_jax.front.data_check import DataLook, ShownSample
from dflop_jax.front.place_check import Fact

BARS, WIDTH, HEIGHT = 24, 360, 96  # of a distribution, and units of its picture
STYLE = """
.grid { display: grid; gap: 18px 28px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); }
.grid figure { margin: 0; } .grid figcaption { font-size: 13px; color: var(--faint); }
table { border-collapse: collapse; width: 100%; } table td, table th { text-align: left;
  vertical-align: top; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line);
  white-space: normal; overflow-wrap: anywhere; font-weight: inherit; }
td:nth-child(2):not(:last-child) { min-width: 11em; }
table tr > :first-child { white-space: nowrap; overflow-wrap: normal; }
table th { font-weight: 600; }
table td.n { text-align: right; }
.wrong { color: #c0392b; font-weight: 600; }
.sample, pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--sheet);
  border: 1px solid var(--line); border-radius: 6px;
  padding: 10px 12px; font-size: 13px; margin: 4px 0; max-height: 28em; overflow-y: auto; }
mark { background: #14746b33; color: inherit; border-radius: 2px; }
.medium { color: var(--accent); }
.bars rect { fill: var(--accent); } .bars text { font-size: 11px; }
@media (max-width: 600px) { body { padding: 16px; } }
"""


def page(facts: Sequence[Fact], data: DataLook | None, why: str, limits: str) -> str:
    """The whole page.

    Args:
      why: nothing of the data could be read, where that is so.
      limits: what is cut to, in words.
    """
    css = resources.files("dflop_jax.report").joinpath("page.css").read_text(encoding="utf-8")
    body = [_section("Here", _facts(facts))]
    if why:
        body.append(_section("Data", f'<p class="wrong">{escape(why)}</p>'))
    if data:
        body += _data(data, limits)
    title = escape(f"dflop check {data.source if data else ''}".strip())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{css}{STYLE}</style></head><body><h1>{title}</h1>{''.join(body)}</body></html>\n"
    )


def _data(data: DataLook, limits: str) -> list[str]:
    read = f"<p>{data.words}.</p>"
    rows = "".join(
        f'<tr><td class="n">{n:,}</td><td>{escape(reason)}</td><td class="small">'
        f"{'<br>'.join(map(escape, _listed(data.examples[reason], n)))}</td></tr>"
        for reason, n in data.bad_by_reason.items()
    )
    bad = f"<table><tr><th>n</th><th>reason</th><th>records</th></tr>{rows}</table>" if rows else ""
    bad += f"<p>{escape(data.remedy[0].upper() + data.remedy[1:])}.</p>" if data.remedy else ""
    cut = (
        f"<p>{escape(limits)}: text is cut of {data.cut_text:,} samples, media are gone from "
        f"{data.cut_media:,}, {data.too_long:,} are left out.</p>"
    )
    pictures = [_bars(f"tokens: {name}", values) for name, values in data.tokens.items()]
    pictures += [_bars(f"pieces: {name}", values) for name, values in data.pieces.items()]
    longest = "".join(
        f'<tr><td class="n">{n:,}</td><td>{escape(name)}</td><td>{escape(media)}</td></tr>'
        for name, n, media in data.longest
    )
    template = _section("Template", f"<pre>{escape(data.template)}</pre>")
    if not pictures:  # no record is good
        return [_section("Records", read + bad), template]
    return [
        _section("Records", read + bad),
        _section("Sizes", cut + f'<div class="grid">{"".join(pictures)}</div>'),
        _section(
            "Longest samples",
            f"<table><tr><th>tokens</th><th>record</th><th>media</th></tr>{longest}</table>",
        ),
        _section(
            "Samples as the model is given them",
            '<p class="small"><mark>Supervised</mark> text is what is learnt; '
            '<span class="medium">[media]</span> stand for their tokens.</p>'
            + "".join(map(_sample, data.samples)),
        ),
        template,
    ]


def _listed(examples: Sequence[str], n: int) -> list[str]:
    """Those that are known of `n` records, and how many more there are."""
    more = n - len(examples)
    return [*examples, *([f"and {more:,} more"] if more else [])]


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _facts(facts: Sequence[Fact]) -> str:
    rows = "".join(
        f"<tr><td>{escape(f.name)}</td><td{' class=wrong' * f.wrong}>{escape(f.value)}</td></tr>"
        for f in facts
    )
    return f"<table>{rows}</table>"


def _bars(title: str, values: np.ndarray) -> str:
    """A distribution as a picture, in equal steps, with its least, median and greatest value."""
    counts, edges = np.histogram(values, BARS)
    step, most = WIDTH / BARS, max(1, int(counts.max()))
    bars = "".join(
        f'<rect x="{k * step:.1f}" y="{HEIGHT * (1 - n / most):.1f}" width="{step - 1:.1f}" '
        f'height="{HEIGHT * n / most:.1f}"><title>{edges[k]:,.0f} to {edges[k + 1]:,.0f}: {n:,}'
        "</title></rect>"
        for k, n in enumerate(counts.tolist())
    )
    ends = (
        f'<text x="0" y="{HEIGHT + 13}">{values.min():,}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 13}" text-anchor="end">{values.max():,}</text>'
    )
    said = f"{escape(title)}; median {np.median(values):,.0f}, in all {values.sum():,}"
    return (
        f'<figure><figcaption>{said}</figcaption><svg class="bars" role="img" '
        f'viewBox="0 0 {WIDTH} {HEIGHT + 16}">{bars}{ends}</svg></figure>'
    )


def _sample(sample: ShownSample) -> str:
    parts = []
    for p in sample.passages:
        text = escape(p.text)
        if p.medium:
            text = f'<span class="medium">{text}</span>'
        parts.append(f"<mark>{text}</mark>" if p.supervised else text)
    head = f"<h3>{escape(sample.name)}, {sample.tokens:,} tokens</h3>"
    return f'{head}<div class="sample">{"".join(parts)}</div>'


def counts_of(values: Mapping[str, np.ndarray]) -> dict[str, list[int]]:
    """Least, median and greatest of each, for programs."""
    return {
        name: [int(v.min()), int(np.median(v)), int(v.max())]
        for name, v in values.items()
        if len(v)
    }

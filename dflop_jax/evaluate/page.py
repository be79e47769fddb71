"""A table of answers to look at: one HTML file that loads nothing."""

from __future__ import annotations

from html import escape
from importlib import resources

from dflop_jax.evaluate.run import AnswerRow, Evaluated

MOST_ROWS = 500  # of the table; all answers are in the JSON file
STYLE = """
table { border-collapse: collapse; width: 100%; font-size: 14px; }
td, th { text-align: left; vertical-align: top; padding: 6px 14px 6px 0; white-space: pre-wrap;
  overflow-wrap: anywhere; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; white-space: nowrap; }
.low { color: #c0392b; }
@media (max-width: 600px) { body { padding: 16px; } }
"""


def page(evaluated: Evaluated, title: str) -> str:
    """The whole page: the metrics, then the answers, as many as `MOST_ROWS`."""
    css = resources.files("dflop_jax.report").joinpath("page.css").read_text(encoding="utf-8")
    rows = evaluated.answers
    metrics = "".join(
        f"<tr><th>{escape(name)}</th><td class='n'>{_number(value)}</td></tr>"
        for name, value in evaluated.metrics.items()
    )
    names = "".join(f"<th class='n'>{escape(name)}</th>" for name in evaluated.metrics)
    heads = f"<th>record</th><th>question</th><th>right</th><th>answer</th>{names}"
    shown = "".join(_row(row, [*evaluated.metrics]) for row in rows[:MOST_ROWS])
    left = len(rows) - MOST_ROWS
    more = f"<p>{left:,} more are in answers.jsonl.</p>" if left > 0 else ""
    failed = len(rows) - evaluated.samples
    trouble = f", {failed:,} could not be asked" if failed else ""
    title = escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{css}{STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{evaluated.samples:,} answered{trouble}.</p><table>{metrics}</table>"
        f"<h2>Answers</h2><table><tr>{heads}</tr>{shown}</table>{more}</body></html>\n"
    )


def _row(row: AnswerRow, metrics: list[str]) -> str:
    if row.trouble:
        cells = f"<td class='low' colspan='{3 + len(metrics)}'>{escape(row.trouble)}</td>"
        return f"<tr><td>{escape(row.name)}</td>{cells}</tr>"
    texts = (row.name, row.question, "\n".join(row.references), row.answer)
    said = "".join(f"<td>{escape(text)}</td>" for text in texts)
    scores = "".join(f"<td class='n'>{_number(row.scores.get(name))}</td>" for name in metrics)
    return f"<tr>{said}{scores}</tr>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"

"""The report as one HTML file that needs nothing else: no network, no script."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib.resources import files

from gateway.calibrate.report import grids, summary
from gateway.calibrate.report.cue_chart import cue_chart
from gateway.calibrate.report.curves import share_curve, speed_curve
from gateway.calibrate.report.evidence import Evidence, Example
from gateway.calibrate.report.examples import written
from gateway.calibrate.report.grids import Column, Grid
from gateway.calibrate.report.svg import tag
from gateway.calibrate.report.trace_strip import trace_strip
from gateway.calibrate.report.views import bars
from gateway.calibrate.report.wording import counted, cut, visible

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser then loads nothing at all
_QUESTION = 600  # columns of an example's question


def html(evidence: Evidence) -> str:
    """The page. All foreign text in it is escaped."""
    title = visible(evidence.title)
    style = files(__package__).joinpath("page.css").read_text("utf-8")
    head = (
        '<meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style>"
    )
    body = "\n".join(_body(evidence, title))
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _body(evidence: Evidence, title: str) -> Iterator[str]:
    yield tag("h1", escape(title))
    yield from _summary(evidence)
    yield tag("h2", "What to expect")
    yield from _expected(evidence)
    yield tag("h2", "The cues")
    yield from _cues(evidence)
    if evidence.examples:
        yield tag("h2", "Margins along a trace")
        yield tag("p", escape(_STRIP), cls="note")
    for number, example in enumerate(evidence.examples, 1):
        yield from _example(evidence, example, number)
    yield tag("h2", "Provenance")
    yield _table(grids.provenance(evidence))
    yield tag("h2", "The policy")
    yield tag("pre", escape(visible(evidence.policy, keep="\n\t")), tabindex=0)


# ---- sections -----------------------------------------------------------------------------------


def _summary(evidence: Evidence) -> Iterator[str]:
    pairs = summary.figures(evidence)
    boxes = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs
    )
    yield tag("dl", boxes, cls="figures")
    first, *others = summary.sentences(evidence)
    if not evidence.cues:
        yield tag("p", escape(first))
    else:
        yield tag("p", escape(f"{grids.summed_up(evidence.selection)}, the best first:"))
        items = "".join(tag("li", escape(visible(cue))) for cue in evidence.cues)
        yield tag("ul", items, cls="cues-chosen")
    yield tag("p", escape(" ".join(others)))


def _expected(evidence: Evidence) -> Iterator[str]:
    share = _figure(
        share_curve(evidence),
        "A point is the list cut after so many cues; its number says how many. Further right, the "
        "small model writes more; further up, fewer traces go wrong.",
    )
    speed = _figure(
        speed_curve(evidence),
        "A line is the list cut after so many cues; where it crosses 1.00 (a circle), relaying "
        "gains nothing. The policy's is bold.",
    )
    yield tag("div", share + speed, cls="pair")
    yield _table(grids.prefixes(evidence))


def _cues(evidence: Evidence) -> Iterator[str]:
    left_out = len(evidence.selection.cues) - len(bars(evidence.selection))
    more = f" {left_out:,} more are in the table alone." if left_out else ""
    yield _figure(
        cue_chart(evidence),
        "Filled bars are chosen cues, hollow ones are not; the thin lines are 95 % intervals, by "
        f"traces drawn anew.{more}",
    )
    yield _table(grids.candidates(evidence.selection))


_STRIP = (
    "Dots are the small model's margins of single tokens, thick lines the means of segments. "
    "Shaded segments, in the lower lane, would be the small model's; a triangle is the cue that "
    "hands over; a cross is a segment in which the small model would go wrong."
)


def _example(evidence: Evidence, example: Example, number: int) -> Iterator[str]:
    trace = example.scored.trace
    size = counted(len(trace.texts), "token")
    yield tag("h3", escape(f"Trace {visible(trace.id)}, {size}"), id=f"trace-{number}")
    question = cut(visible(trace.question, keep="\n\t"), _QUESTION)
    yield tag("p", escape(question))
    yield _scroll(trace_strip(evidence, example), f"Margins along trace {number}")
    legend = (
        '<p class="note">Plain text is the large model’s, underlined text the small model’s (a '
        "double line where it would go wrong), bold text a cue.</p>"
    )
    text = tag("summary", "Who would write what") + legend + written(evidence, example)
    yield tag("details", text, **({"open": ""} if number == 1 else {}))


# ---- parts --------------------------------------------------------------------------------------


def _figure(drawn: str, caption: str) -> str:
    return tag("figure", drawn + tag("figcaption", escape(caption)))


def _scroll(content: str, label: str) -> str:
    """A part that may be wider than the screen, reached by keyboard too."""
    return tag("div", content, cls="scroll", tabindex=0, role="region", aria_label=label)


def _table(grid: Grid) -> str:
    head = "".join(
        tag("th", escape(column.name), scope="col", cls=_kind(column)) for column in grid.columns
    )
    rows = "".join(_row(grid, i) for i in range(len(grid.rows)))
    caption = tag("caption", tag("span", escape(grid.title)))
    table = tag("table", f"{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody>")
    note = tag("p", escape(grid.note), cls="note") if grid.note else ""
    return _scroll(table, grid.title) + note


def _row(grid: Grid, index: int) -> str:
    first, *others = grid.rows[index]
    kind = _kind(grid.columns[0])
    cells = tag("th", _cell(first), scope="row", cls=kind)
    for column, cell in zip(grid.columns[1:], others, strict=True):
        cells += tag("td", _cell(cell), cls=_kind(column))
    return tag("tr", cells, **({"cls": "marked"} if index in grid.marked else {})) + "\n"


def _cell(words: str) -> str:
    return tag("span", escape(words))


def _kind(column: Column) -> str:
    return "numeric" if column.numeric else "words"

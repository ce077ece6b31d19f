"""A trace's own text, by who would write it, as HTML."""

from __future__ import annotations

from html import escape

from gateway.calibrate.report.evidence import Evidence, Example
from gateway.calibrate.report.views import Block, blocks
from gateway.calibrate.report.wording import counted, cut, visible
from relaygen.events import Role

_MAX_TOKENS = 1500  # of a trace's text on the page
_MAX_TOKEN = 200  # characters of one token


def written(evidence: Evidence, example: Example) -> str:
    """The beginning of the trace, each role's text marked by colour, line and title."""
    texts = example.scored.trace.texts
    parts = [
        _part(block, _joined(texts[block.start : min(block.end, _MAX_TOKENS)]))
        for block in blocks(example, evidence)
        if block.start < _MAX_TOKENS
    ]
    more = len(texts) - _MAX_TOKENS
    rest = f'<p class="note">… and {counted(more, "token")} more.</p>' if more > 0 else ""
    return f'<div class="written">{"".join(parts)}</div>{rest}'


def _joined(texts: tuple[str, ...]) -> str:
    return "".join(cut(visible(text, keep="\n\t"), _MAX_TOKEN) for text in texts)


def _part(block: Block, text: str) -> str:
    if block.role is Role.LARGE:
        head = text.removesuffix(block.cue) if block.cue else text
        cue = text[len(head) :]
        marked = f"<b>{escape(cue)}</b>" if cue else ""
        return f'<span class="large">{escape(head)}{marked}</span>'
    wrong = ", goes wrong" if block.wrong else ""
    title = f"small model, {counted(block.end - block.start, 'token')}{wrong}"
    cls = "small wrong" if block.wrong else "small"
    return f'<span class="{cls}" title="{title}">{escape(text)}</span>'

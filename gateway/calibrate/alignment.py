"""One text cut in two ways: what is known of one's tokens brought to the other's. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.calibrate.scorers import UNKNOWN, Value

_BROKEN = "\ufffd"


def ends(text: str, tokens: Sequence[str]) -> list[int]:
    """Where in `text` each token ends, in characters.

    A token may be told without its leading blank, or as U+FFFD where it is part of a character;
    such a run of tokens ends where the next token is found again.
    """
    found: list[int] = []
    at, unsure = 0, 0
    for token in tokens:
        end = None if _BROKEN in token or not token else _end(text, token, at, unsure)
        if end is None:
            unsure += 1
            continue
        found += [end - len(token)] * unsure + [end]
        at, unsure = end, 0
    return found + [len(text)] * unsure


def _end(text: str, token: str, at: int, unsure: int) -> int | None:
    """The end of a token that begins here, or a little later after some that were not found."""
    if not unsure:
        for form in (token, " " + token):
            if text.startswith(form, at):
                return at + len(form)
        return None
    start = text.find(token, at, at + 8 * unsure + len(token))
    return None if start < 0 else start + len(token)


def brought_back(
    texts: Sequence[str], scorer_texts: Sequence[str], values: Sequence[Value]
) -> list[Value]:
    """A value for each of `texts` from those of the scorer's tokens that end inside it.

    The least margin; a hit if all of them are. Unknown where none ends, or one is unknown.
    """
    stops = ends("".join(texts), scorer_texts)
    result, at, next_one = [], 0, 0
    for text in texts:
        at += len(text)
        inside: list[Value] = []
        while text and next_one < len(stops) and stops[next_one] <= at:
            inside.append(values[next_one])
            next_one += 1
        result.append(_together(inside))
    return result


def _together(values: Sequence[Value]) -> Value:
    margins = [value.margin for value in values if value.margin is not None]
    hits = [value.hit for value in values if value.hit is not None]
    if not values or len(margins) < len(values) or len(hits) < len(values):
        return UNKNOWN
    return Value(min(margins), all(hits))

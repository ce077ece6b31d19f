"""Candidate cues: the list of RelayGen's authors, and what the traces' own sentences begin with."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice

from relaygen.boundaries import BoundarySet
from relaygen.calibration.segments import Segmenter, Span
from relaygen.cues import CueMatch, CueSet
from relaygen.words import joined

# arXiv 2602.06454; each also with a trailing comma and in lower case.
_AUTHORS: tuple[str, ...] = (
    *("Therefore", "Thus", "So", "Similarly", "Also", "Alternatively", "Wait", "Hmm", "But"),
    *("However", "Hence", "Another", "Oh", "Maybe", "Other", "Again", "Now", "Ah", "Any"),
    *("Specifically", "Then", "Next", "check", "double-check", "verify"),
)
REFERENCE = tuple(
    dict.fromkeys(
        form for word in _AUTHORS for form in (word, f"{word},", word.lower(), f"{word.lower()},")
    )
)
_MAX_SEEN = 50_000  # distinct beginnings kept at once: memory is bounded whatever the traces say
_MAX_OWN = 500  # of them are tried: each costs time, and Holm's correction asks more of every other
_UNSPACED_LENGTHS = range(1, 5)  # characters with their marks, where no blanks part words
_INSIDE = "'’-"  # between two letters they are the word's


class Beginnings:
    """Counts what sentences begin with: the first word, and the first two."""

    def __init__(self, boundaries: BoundarySet) -> None:
        self._segmenter = Segmenter((), boundaries, 1)
        self._sentences: Counter[str] = Counter()
        self._traces: Counter[str] = Counter()

    def add(self, texts: Sequence[str], span: Span) -> None:
        """The sentences of one trace's thinking."""
        self._segmenter.read(texts)
        found = [
            text
            for sentence in self._segmenter.sentences(span, any_length=True)
            for text in beginnings("".join(texts[sentence.start : sentence.end]))
        ]
        self._sentences.update(found)
        self._traces.update(set(found))
        if len(self._sentences) > _MAX_SEEN:
            self._forget()

    def _forget(self) -> None:
        """Drops the rarest half."""
        kept = dict(self._sentences.most_common(_MAX_SEEN // 2))
        self._sentences = Counter(kept)
        self._traces = Counter({text: self._traces[text] for text in kept})

    def frequent(self, *, sentences: int, traces: int) -> tuple[str, ...]:
        """Those that begin so many sentences, in so many traces; the most frequent first."""
        often = (
            text
            for text, count in self._sentences.most_common()
            if count >= sentences and self._traces[text] >= traces
        )
        return tuple(islice(often, _MAX_OWN))


def beginnings(sentence: str) -> tuple[str, ...]:
    """What a sentence begins with, as cues: "Let", "Let me"; a few characters of unspaced text."""
    text = sentence.lstrip()
    first = _word_end(text, 0)
    if not first:
        return ()
    if not joined(text[0], "a"):  # a script without blanks between words
        edges = [end for end in range(1, first) if not _is_mark(text[end])] + [first]
        return tuple(text[:end] for _, end in zip(_UNSPACED_LENGTHS, edges, strict=False))
    second = _word_end(text, first + 1) if text[first : first + 1] == " " else 0
    return (text[:first], text[:second]) if second else (text[:first],)


def _word_end(text: str, start: int) -> int:
    """Where the letters that begin at `start` end; 0 where none do."""
    if not text[start : start + 1].isalpha():
        return 0
    for end in range(start + 1, len(text)):
        char = text[end]
        if (
            char.isalpha()
            or _is_mark(char)
            or (char in _INSIDE and text[end + 1 : end + 2].isalpha())
        ):
            continue
        return 0 if joined(text[end - 1], char) else end  # "x" of "x2" is no word
    return len(text)


def _is_mark(char: str) -> bool:
    """Whether it combines with the letter before it."""
    return unicodedata.category(char)[0] == "M"


def layers(cues: Iterable[str], match: CueMatch = CueMatch.WORD) -> list[CueSet]:
    """The cues in sets in which none hides another: "Now" and "Now," are measured apart."""
    left = list(dict.fromkeys(cues))
    found: list[CueSet] = []
    while left:
        compiled = CueSet(left, match)
        hidden = [cue for cue in left if hidden_by(cue, left, compiled)]
        later = set(hidden)
        found.append(CueSet([cue for cue in left if cue not in later], match))
        left = hidden
    return found


def hidden_by(cue: str, others: Iterable[str], match: CueSet) -> str | None:
    """The first of `others` that is complete before `cue`, wherever that stands."""
    return next((o for o in others if o != cue and match.hides(o, cue)), None)

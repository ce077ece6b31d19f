"""The segments that a cue would hand over, and the sentences of a trace, by the online matchers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from relaygen.boundaries import BoundaryMatcher, BoundarySet
from relaygen.calibration.completions import Completions
from relaygen.cues import CueMatcher, CueSet
from relaygen.policy import Thinking

_CONTEXT = 16  # characters before a segment that its matchers see, as online
_MAX_ANSWERS = 200_000  # remembered: memory is bounded whatever the traces say


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `start` to before `end` of a trace; `cue` is the text that they follow, "" if none."""

    start: int
    end: int
    cue: str = ""


def thought(texts: Sequence[str], thinking: Thinking) -> Span:
    """The tokens between the tags, those that hold a bit of a tag left out.

    Text with no opening tag is taken for reasoning, as if the prompt had opened it.
    """
    ends = list(accumulate(map(len, texts)))
    opened, tag, _ = _tags("".join(texts), thinking)
    start = bisect_right(ends, opened - 1) + 1 if opened else 0
    return Span(start, max(start, bisect_right(ends, tag)))


def closed(texts: Sequence[str], thinking: Thinking) -> int:
    """Index after the token that closes the thinking; all tokens where none does."""
    ends = list(accumulate(map(len, texts)))
    _, tag, after = _tags("".join(texts), thinking)
    return bisect_right(ends, after - 1) + 1 if after > tag else len(texts)


def _tags(text: str, thinking: Thinking) -> tuple[int, int, int]:
    """Where the opening tag ends, and the closing tag begins and ends: 0 and the text's end where
    there is none."""
    begun = text.lstrip()
    opened = len(text) - len(begun) + len(thinking.open) if begun.startswith(thinking.open) else 0
    tag = text.find(thinking.close, opened)
    return (opened, tag, tag + len(thinking.close)) if tag >= 0 else (opened, len(text), len(text))


class _Marks(dict[str, bool]):
    """By text of a token: whether a boundary may begin, go on or end in it. One without text goes
    on."""

    def __init__(self, marks: Iterable[str]) -> None:
        super().__init__()
        self._chars = frozenset("".join(marks))

    def __missing__(self, text: str) -> bool:
        self[text] = marked = not text or not self._chars.isdisjoint(text)
        return marked


class Segmenter:
    """Finds sentences and the segments after cues in one trace after the other.

    The online matchers decide. They are only spared the tokens that cannot matter to them, and
    asked but once about a token that comes again. `cues` come in sets, each measured as if it were
    the policy's. `longest` is its max_small_tokens.
    """

    def __init__(self, cues: Sequence[CueSet], boundaries: BoundarySet, longest: int) -> None:
        self.longest = longest
        self._matchers = [CueMatcher(some) for some in cues]
        self._completions = Completions([some.words for some in cues])
        self._answers: dict[tuple[int, int, str, str], str] = {}
        self._boundaries = BoundaryMatcher(boundaries)
        self._marks = _Marks(mark for ends in boundaries.automaton.ends for mark in ends)
        self.read(())

    def read(self, texts: Sequence[str]) -> None:
        """Go on with this trace."""
        self._forget()
        self._texts, self._text = texts, "".join(texts)
        self._starts = list(accumulate(map(len, texts), initial=0))
        self._marked = bytes(map(self._marks.__getitem__, texts))
        self._ends: dict[int, int] = {}  # by token: where the sentence ends

    def _forget(self) -> None:
        for known in (self._answers, self._marks):
            if len(known) > _MAX_ANSWERS:
                known.clear()

    def sentences(self, span: Span, *, any_length: bool = False) -> Iterator[Span]:
        """The span cut at every boundary: the small segments, had each sentence a cue."""
        start = span.start
        while start < span.end:
            end = self._end(start, span.end) if any_length else self.segment_end(start, span.end)
            yield Span(start, end)
            start = end

    def after_cues(self, span: Span) -> Iterator[Span]:
        """The segment after every cue in the span, also where one segment holds another's cue."""
        for i, begun, sets in self._completions.find(self._texts, span.start, span.end - 1):
            for one in sets:
                if cue := self._cue(one, i, begun):
                    yield Span(i + 1, self.segment_end(i + 1, span.end), cue)

    def cue_end(self, one: int, start: int, end: int, armed: int) -> int:
        """Index after the token that ends a large segment from `start` on; `end` where none does.

        Cues of the set number `one`; those complete before the token `armed` do not count.
        """
        for i, begun, sets in self._completions.find(self._texts, start, end):
            if i >= armed and one in sets and self._cue(one, i, begun):
                return i + 1
        return end

    def segment_end(self, start: int, end: int) -> int:
        """Index after the last token of a small segment: at least one, before `end`."""
        stop = min(end, start + self.longest)
        while stop < end and not self._texts[stop - 1]:  # its text comes with the next one
            stop += 1
        return self._end(start, stop)

    def _cue(self, one: int, i: int, begun: int) -> str:
        """The cue of the set number `one` that is complete with token `i`, "" if it is none there.

        It begins `begun` characters before the token at most.
        """
        start, text = self._starts[i], self._texts[i]
        before = self._text[max(0, start - begun - 1) : start]
        key = (one, begun, before, text)
        cue = self._answers.get(key)
        if cue is None:
            cue = self._answers[key] = _cue(self._matchers[one], before, begun, text)
        return cue

    def _end(self, start: int, stop: int) -> int:
        """Index after the token that ends the sentence; `stop` where none does."""
        at = self._marked.find(1, start, stop)
        if at < 0:
            return stop
        if at not in self._ends:
            self._ends[at] = self._sentence_end(at)
        return min(self._ends[at], stop)

    def _sentence_end(self, at: int) -> int:
        """The same from a token with a mark on."""
        matcher, marked = self._boundaries, self._marked
        while at >= 0:
            matcher.reset(self._text[max(0, self._starts[at] - _CONTEXT) : self._starts[at]])
            for i in range(at, len(marked)):
                cut = matcher.push(self._texts[i])
                if cut is not None:
                    return i + bool(cut.keep)
                if not marked[i]:  # after one, a dot may wait, or a line end for another
                    break
            at = marked.find(1, i + 1)
        return len(marked)


def _cue(matcher: CueMatcher, before: str, begun: int, text: str) -> str:
    """What the matcher says of a token after the text `before`, whose end may begin a cue."""
    seen = len(before) - begun
    matcher.reset(before[:seen])
    matcher.push(before[seen:], armed=False)
    cut = matcher.push(text)
    return cut.text if cut else ""


def sentences(texts: Sequence[str], span: Span, boundaries: BoundarySet) -> Iterator[Span]:
    """The sentences of one trace, of any length; see Segmenter."""
    segmenter = Segmenter((), boundaries, len(texts))
    segmenter.read(texts)
    return segmenter.sentences(span, any_length=True)


def after_cues(
    texts: Sequence[str], span: Span, cues: CueSet, boundaries: BoundarySet, longest: int
) -> Iterator[Span]:
    """The segments of one trace after one set of cues; see Segmenter."""
    segmenter = Segmenter((cues,), boundaries, longest)
    segmenter.read(texts)
    return segmenter.after_cues(span)

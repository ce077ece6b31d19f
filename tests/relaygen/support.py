"""A scripted pair of engines, a driver that records all it sees, and strategies for both."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, groupby
from typing import Any

from hypothesis import strategies as st

from relaygen.events import (
    DecodeChunk,
    DecodeFinished,
    DecodeRequest,
    Delta,
    Finished,
    Handoff,
    Output,
    Piece,
    Role,
)
from relaygen.policy import Policy
from relaygen.session import Limits, RelaySession
from relaygen.thinking import Phase

VOCABULARY = (
    b"<eos>", b"</think>", b"<think>", b"\n", b"Now", b" Now", b"Now,", b"know", b"Thus", b"There",
    b"fore", b"by", b"Other", b"wise", b" so", b" 3", b".", b"14", b"\n\n", b"?!", b'."', b" ",
    b"  ", b"!", b"</", b"think", b">", b"1", b" x", b"END", b"EN", b"D", b"\xc3", b"\xa9",
    b" \xf0\x9f", b"\x98\x80", b"\xe6\x89\x80\xe4\xbb\xa5", b"ok. ", b"a",
)  # fmt: skip
EOS, CLOSE, OPEN, LINE = 0, 1, 2, 3
HOT = (b" Now", b"Now,", b"Thus", b" so", b".", b"?!", b"\n\n", b"ok. ")


def bytes_of(ids: Sequence[int]) -> bytes:
    return b"".join(VOCABULARY[i] for i in ids)


def text_of(ids: Sequence[int]) -> str:
    """The text of token ids, as a tokenizer decodes them."""
    return bytes_of(ids).decode("utf-8", "replace")


def make_policy(
    *words: str,
    match: str = "word",
    ends: Sequence[str] = (".", "!", "?", "\n\n"),
    boundary: str = "sentence",
    **fields: Any,
) -> Policy:
    """A policy for tests: cues may fire at once unless `min_large_tokens` says otherwise."""
    return Policy.model_validate(
        {
            "version": 1,
            "name": "pair",
            "large": {"backend": "large", "model": "L"},
            "small": {"backend": "small", "model": "S"},
            "cues": {"match": match, "words": list(words)},
            "boundary": {"match": boundary, "ends": list(ends)},
            "min_large_tokens": 0,
            **fields,
        }
    )


# ---- engines that write from a script -----------------------------------------------------------


@dataclass(frozen=True)
class ScriptedModel:
    """Goes on from any prefix: its next token depends on the prefix alone, as a model's does."""

    tokens: tuple[int, ...]
    opening: int | None = None
    closes_at: int | None = None
    ends_at: int = 90

    def next(self, prefix: bytes) -> int:
        if not prefix and self.opening is not None:
            return self.opening
        if len(prefix) >= self.ends_at:
            return EOS
        closes = self.closes_at is not None and len(prefix) >= self.closes_at
        if closes and VOCABULARY[CLOSE] not in prefix:
            return CLOSE
        return self.tokens[zlib.crc32(prefix) % len(self.tokens)]

    def ids(self, prefix: bytes) -> Iterator[int]:
        """All it would write after `prefix`, up to its end of turn."""
        while (token := self.next(prefix)) != EOS:
            yield token
            prefix += VOCABULARY[token]


@dataclass(frozen=True)
class Pair:
    """Two engines. `grouping` says how many tokens each piece tells at once."""

    large: ScriptedModel
    small: ScriptedModel
    with_ids: bool = True
    tells_tokens: bool = True
    grouping: tuple[int, ...] = (1,)

    def decode(self, request: DecodeRequest) -> tuple[list[Piece], DecodeFinished]:
        prefix = request.prefix
        before = prefix.encode() if isinstance(prefix, str) else bytes_of(prefix)
        model = self.large if request.role is Role.LARGE else self.small
        ids, reason = list(model.ids(before)), "stop"
        if request.max_tokens is not None and request.max_tokens <= len(ids):
            ids, reason = ids[: request.max_tokens], "length"
        tokens = len(ids) + (reason == "stop")
        pieces = list(self._grouped(list(told(ids, with_ids=self.with_ids))))
        return pieces, DecodeFinished(reason, tokens if self.tells_tokens else None)

    def _grouped(self, pieces: list[Piece]) -> Iterator[Piece]:
        sizes = cycle(self.grouping)
        while pieces:
            size = min(next(sizes), len(pieces))
            while size > 1 and not pieces[size - 1].text:  # ids and text of a piece agree
                size -= 1
            group, pieces = pieces[:size], pieces[size:]
            text = "".join(piece.text for piece in group)
            yield Piece(text, tuple(i for piece in group for i in piece.ids), len(group))


def told(ids: Sequence[int], *, with_ids: bool = True) -> Iterator[Piece]:
    """One piece a token; no text, as in vLLM, while the last character is incomplete."""
    decoder, waiting = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for token in ids:
        waiting += decoder.decode(VOCABULARY[token])
        complete = not decoder.getstate()[0]
        yield Piece(waiting if complete else "", (token,) if with_ids else ())
        waiting = "" if complete else waiting


# ---- a driver -----------------------------------------------------------------------------------


@dataclass
class Run:
    """What a driver saw of one generation."""

    session: RelaySession
    requests: list[DecodeRequest] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Length of the text kept when each decode was asked for."""
    kept: list[int] = field(default_factory=list)
    """Tokens kept when each decode was asked for."""
    outputs: list[Output] = field(default_factory=list)
    fed: int = 0

    @property
    def deltas(self) -> list[Delta]:
        return [output for output in self.outputs if isinstance(output, Delta)]

    @property
    def handoffs(self) -> list[Handoff]:
        return [output for output in self.outputs if isinstance(output, Handoff)]

    @property
    def text(self) -> str:
        """What the client read, tags and all."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def end(self) -> Finished:
        end = self.outputs[-1]
        assert isinstance(end, Finished)
        return end

    @property
    def written(self) -> list[tuple[str, str]]:
        """Role and text of each segment, by the deltas."""
        return segments(self.deltas)


def segments(deltas: Sequence[Delta]) -> list[tuple[str, str]]:
    return [
        (role.value, "".join(delta.text for delta in group))
        for (role, _), group in groupby(deltas, lambda delta: (delta.role, delta.segment))
    ]


def joined_deltas(deltas: Sequence[Delta]) -> list[tuple[Role, int, str, str]]:
    """Deltas with neighbours of one role, segment and kind joined, as chunks may part them."""
    return [
        (*key, "".join(delta.text for delta in group))
        for key, group in groupby(deltas, lambda delta: (delta.role, delta.segment, delta.kind))
    ]


def drive(session: RelaySession, pair: Pair, chunks: Sequence[int] = (1,)) -> Run:
    """Play a generation to its end; `chunks` are the numbers of pieces that each read brings."""
    run, sizes = Run(session), cycle(chunks)
    while (request := session.next_decode()) is not None:
        assert len(run.requests) < 400, "the generation never ends"
        run.requests.append(request)
        run.starts.append(len(session.text))
        run.kept.append(session.usage.completion_tokens)
        pieces, finished = pair.decode(request)
        count = sum(piece.tokens for piece in pieces)
        while pieces and session.decoding:
            size = next(sizes)
            chunk, pieces = pieces[:size], pieces[size:]
            run.fed += sum(piece.tokens for piece in chunk)
            run.outputs += session.receive(DecodeChunk(tuple(chunk)))
        if session.decoding:
            run.fed += (finished.tokens or count) - count
            run.outputs += session.receive(finished)
    return run


def drive_broken(session: RelaySession, pair: Pair, breaks: Sequence[int | None]) -> Run:
    """The same, one piece a read, with decodes that break after so many pieces (None: they don't).

    Each is gone on from by the same role.
    """
    run, left = Run(session), iter(breaks)
    while (request := session.next_decode()) is not None:
        assert len(run.requests) < 400, "the generation never ends"
        run.requests.append(request)
        run.kept.append(session.usage.completion_tokens)
        pieces, finished = pair.decode(request)
        after = next(left, None)
        for piece in pieces[:after]:
            if session.decoding:
                run.fed += piece.tokens
                run.outputs += session.receive(DecodeChunk((piece,)))
        if session.decoding and after is not None:
            run.outputs += session.resume()
        elif session.decoding:
            run.fed += (finished.tokens or len(pieces)) - len(pieces)
            run.outputs += session.receive(finished)
    return run


# ---- one decode at a time, by hand --------------------------------------------------------------


def tokens(*texts: str) -> DecodeChunk:
    """A chunk of one-token pieces with these texts."""
    return DecodeChunk(tuple(Piece(text, (i + 1,)) for i, text in enumerate(texts)))


END_OF_TURN = DecodeFinished("stop")


def play(session: RelaySession, *decodes: Sequence[str], end: str = "stop") -> Run:
    """Feed each decode in turn its tokens, one a chunk, and the end of turn where it is read."""
    run = Run(session)
    for texts in decodes:
        request = session.next_decode()
        assert request is not None, "the generation has ended"
        run.requests.append(request)
        for text in texts:
            if session.decoding:
                run.fed += 1
                run.outputs += session.receive(tokens(text))
        if session.decoding:
            run.outputs += session.receive(DecodeFinished(end))
    return run


def thinking_session(policy: Policy, limits: Limits | None = None, **options: Any) -> RelaySession:
    """A session whose prompt has opened the thinking."""
    return RelaySession(policy, limits or Limits(), **{"phase": Phase.THINKING, **options})


# ---- strategies ---------------------------------------------------------------------------------

chunkings = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


# Few tokens that end a turn or close the thinking, and some that hand over in every script:
# otherwise most generations would have one segment.
inner = st.integers(min_value=OPEN, max_value=len(VOCABULARY) - 1)
hot = st.permutations([VOCABULARY.index(token) for token in HOT])


@st.composite
def models(draw: st.DrawFn) -> ScriptedModel:
    script = [
        *draw(hot)[: draw(st.sampled_from([4, 4, 8, 1, 0]))],
        *draw(st.lists(inner, max_size=9)),
    ]
    script += draw(st.sampled_from([(), (), (), (EOS,), (CLOSE,)]))
    return ScriptedModel(
        tokens=tuple(draw(st.permutations(script or [LINE]))),
        opening=draw(st.sampled_from([None, OPEN, LINE])),
        closes_at=draw(st.sampled_from([None, *range(0, 120, 8)])),
        ends_at=draw(st.sampled_from([*range(80, 160, 5), 0, 1, 9, 30])),
    )


@st.composite
def pairs(draw: st.DrawFn, *, with_ids: bool | None = None) -> Pair:
    return Pair(
        large=draw(models()),
        small=draw(models()),
        with_ids=draw(st.booleans()) if with_ids is None else with_ids,
        tells_tokens=draw(st.booleans()),
        grouping=tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))),
    )


@st.composite
def policies(draw: st.DrawFn, *, match: str | None = None) -> Policy:
    """Any policy; `match` "word" never cuts inside a token, "substring" does."""
    cues = ["Now", "Thus", "so", "Therefore", "Other", "know", "There", "所以"]
    words = draw(st.permutations(cues))[: draw(st.sampled_from([8, 8, 8, 3, 1, 0]))]
    matches = st.just(match) if match else st.sampled_from(["word", "word", "substring"])
    return make_policy(
        *words,
        match=draw(matches),
        boundary=draw(matches).replace("word", "sentence"),
        answer=draw(st.sampled_from(["small", "large"])),
        plain=draw(st.sampled_from(["large", "relay"])),
        min_large_tokens=draw(st.sampled_from([0, 0, 1, 3])),
        max_small_tokens=draw(st.integers(1, 8)),
        stops=draw(st.sampled_from(["answer", "all"])),
    )


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    return Limits(
        max_tokens=draw(st.none() | st.integers(1, 90)),
        min_tokens=draw(st.none() | st.integers(0, 30)),
        seed=draw(st.none() | st.integers(0, 1000)),
    )


@st.composite
def session_options(draw: st.DrawFn) -> dict[str, Any]:
    """How a generation starts; thinking, mostly, as that is what is relayed."""
    return {
        "handoff": draw(st.sampled_from(["tokens", "text"])),
        "phase": draw(st.sampled_from([*[Phase.THINKING] * 3, *Phase])),
        "solo": draw(st.sampled_from([*[None] * 8, Role.LARGE, Role.SMALL])),
        "close_ids": draw(st.sampled_from([(), (LINE, CLOSE)])),
    }

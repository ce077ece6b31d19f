"""The second stage: how sure a scorer is at every token of the traces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gateway.calibrate.alignment import brought_back
from gateway.calibrate.files import (
    OrderedLines,
    WorkFolder,
    WorkFolderError,
    line_ids,
    stream_lines,
)
from gateway.calibrate.pool import patiently, spread
from gateway.calibrate.scorers import Scorer, Value, scorer_for
from gateway.calibrate.sides import Side, connected
from gateway.calibrate.tracing import OnNote, OnProgress
from gateway.errors import RequestError
from relaygen.calibration.traces import OnBadLine, Score, Trace, read_traces, to_line

ScorerRole = Literal["small", "large"]
_REMEDY = "delete {} to score anew, or take another --work folder"


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """`side` is the small model's engine; the large model's own margins are in the traces."""

    work: Path
    scorer: ScorerRole = "small"
    side: Side | None = None
    concurrency: int = 4
    patience_s: float = 600.0
    on_bad: OnBadLine = "stop"


@dataclass(slots=True)
class ScoreResult:
    """`scores` of `traces` are there. `how` they came about; `unknown` tokens of this run."""

    how: str = ""
    scores: int = 0
    traces: int = 0
    tokens: int = 0
    unknown: int = 0
    notes: list[str] = field(default_factory=list)


async def score(
    settings: ScoreSettings, on_progress: OnProgress, on_note: OnNote | None = None
) -> ScoreResult:
    """Scores the traces that have none. Killed at any moment, the next call goes on.

    Raises GatewayError, WorkFolderError and BadLineError.
    """
    result = ScoreResult()

    def tell(note: str) -> None:
        result.notes.append(note)
        if on_note is not None:
            on_note(note)

    folder = WorkFolder(settings.work)
    if not folder.traces.is_file():
        raise WorkFolderError(f"{folder.traces} is not there; record traces first")
    ids = list(line_ids(folder.traces, settings.on_bad))
    with OrderedLines(folder.scores(settings.scorer), ids) as lines:
        for note in lines.told:
            tell(note)
        run = _Run(settings, folder, lines, len(ids), result, on_progress, tell)
        on_progress(lines.done, len(ids))
        await (run.streamed() if settings.scorer == "large" else run.forced())
        result.scores, result.traces = lines.done, len(ids)
        run.leave_out()
    if result.unknown:
        tell(f"{result.unknown} of {result.tokens} tokens have no score")
    return result


class _Run:
    def __init__(
        self,
        settings: ScoreSettings,
        folder: WorkFolder,
        lines: OrderedLines,
        total: int,
        result: ScoreResult,
        on_progress: OnProgress,
        tell: OnNote,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._lines = lines
        self._total = total
        self._result = result
        self._on_progress = on_progress
        self._tell = tell

    # ---- the large model's own margins ----------------------------------------------------------

    async def streamed(self) -> None:
        """No engine is asked: what the large model told as it wrote."""
        kind = self._folder.meta().get("large", {}).get("margins", "raw")
        self._result.how = f"the large model's own margins as it wrote the traces ({kind})"
        self._tell(f"scored by {self._result.how}")
        kept = _Kept(stream_lines(self._folder.traces))
        for index, trace in self._missing(kept):
            hits = json.loads(kept.line).get("hits") or [None] * len(trace.texts)
            pairs = zip(trace.margins, hits, strict=True)
            self._put(index, trace, [Value(m, hit) for m, hit in pairs])

    # ---- an engine that is given the traces -----------------------------------------------------

    async def forced(self) -> None:
        side = self._settings.side
        if side is None:
            raise RequestError("the scorer's engine is not given")
        async with connected(side) as small:
            scorer = scorer_for(small)
            described = await small.described()
            same = self._same_vocabulary(described["vocabulary"])
            self._note(described, same)

            async def one(item: tuple[int, Trace]) -> None:
                index, trace = item
                values = await patiently(
                    lambda: _values(scorer, trace, same=same),
                    self._settings.patience_s,
                    self._tell,
                )
                self._put(index, trace, values)

            lines = stream_lines(self._folder.traces)
            await spread(self._missing(lines), one, self._settings.concurrency)

    def _same_vocabulary(self, vocabulary: str | None) -> bool:
        of_traces = self._folder.meta().get("large", {}).get("vocabulary")
        return vocabulary is not None and vocabulary == of_traces

    def _note(self, described: dict[str, Any], same: bool) -> None:
        name = self._settings.scorer
        path = self._folder.scores(name).name
        how = "by the traces' own token ids" if same else "by text: its vocabulary is another one"
        self._result.how = f"{described['engine']} {described['version']}, {how}"
        made_from = {"model": described["model"], "same_vocabulary": same}
        self._folder.begin(
            f"scores-{name}", made_from, _REMEDY.format(path), fresh=not self._lines.done
        )
        self._folder.note(small={**described, "scored": how})
        if not same:
            self._tell(f"the scorer's vocabulary is not the traces': scored {how}")

    # ---- both -----------------------------------------------------------------------------------

    def _missing(self, lines: Iterable[str]) -> Iterator[tuple[int, Trace]]:
        """The traces that have no score yet, with their index; one in memory."""
        told: list[str] = []
        for trace in read_traces(lines, str(self._folder.traces), self._settings.on_bad, told):
            index = self._lines.index(trace.id)
            if index is not None and self._lines.misses(index):
                yield index, trace
        for note in told:
            self._tell(f"{note}; left out")

    def leave_out(self) -> None:
        """No score comes for what could not be read."""
        for index in list(self._lines.missing()):
            self._lines.skip(index)

    def _put(self, index: int, trace: Trace, values: list[Value]) -> None:
        unknown = sum(value.margin is None for value in values)
        self._result.tokens += len(values)
        self._result.unknown += unknown
        made = Score(
            id=trace.id,
            scorer=self._settings.scorer,
            margins=tuple(None if v.margin is None else round(v.margin, 6) for v in values),
            hits=tuple(value.hit for value in values),
        )
        self._lines.put(index, to_line(made))
        self._on_progress(self._lines.done, self._total)


class _Kept:
    """Lines as they are read, the last one kept."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = lines
        self.line = ""

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.line = line
            yield line


async def _values(scorer: Scorer, trace: Trace, *, same: bool) -> list[Value]:
    """A value for each token of the trace."""
    if same and trace.ids and trace.prompt_ids:
        return await scorer.values(trace.prompt_ids, trace.ids)
    prompt = await scorer.side.prompt(trace.question)
    ids, texts = await scorer.cut("".join(trace.texts))
    values = await scorer.values(prompt.ids or (), ids)
    return brought_back(trace.texts, texts, values)

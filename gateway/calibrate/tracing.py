"""The first stage: generations of the large model, recorded token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from gateway.calibrate.files import OrderedLines, WorkFolder, has_lines
from gateway.calibrate.pool import passing, patiently, spread
from gateway.calibrate.questions import Questions, read_questions
from gateway.calibrate.recording import Recording, decode_request, record, sdk
from gateway.calibrate.sides import Connected, Side, connected
from gateway.calibrate.speeds import measured
from gateway.engines.base import Sampling
from gateway.engines.tokenization import Prompt
from gateway.errors import GatewayError, RequestError
from relaygen.calibration.traces import Trace

OnProgress = Callable[[int, int], None]
"""Called with what is done and what there is to do."""
OnNote = Callable[[str], None]

_LOGPROBS = 2
_HOPELESS = 3
"""Refusals before anything went well that show that all will be refused."""
_TEMPERED = frozenset({"sglang", "tgi"})
"""Engines whose logprobs are of what is left after temperature and the like."""
_REMEDY = "take another --work folder, or delete this one"


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What to record. `prompts` is FILE.jsonl or hf:OWNER/NAME[:SPLIT], of which `limit` are taken.

    With `small`, the speeds of both models are measured too. `sampling` are more request fields
    (top_p, top_k). `patience_s`: seconds for which an engine may be away.
    """

    work: Path
    prompts: str
    large: Side
    small: Side | None = None
    samples: int = 4
    max_tokens: int = 32768
    temperature: float = 0.6
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    concurrency: int = 8
    limit: int | None = None
    patience_s: float = 600.0


@dataclass(slots=True)
class TraceResult:
    """`traces` of `asked` are there; `notes` were told on the way. `speeds` in milliseconds."""

    traces: int = 0
    asked: int = 0
    refused: int = 0
    speeds: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)


async def trace(
    settings: TraceSettings, on_progress: OnProgress, on_note: OnNote | None = None
) -> TraceResult:
    """Records what is missing in the work folder. Killed at any moment, the next call goes on.

    Raises GatewayError, QuestionsError, WorkFolderError and BadLineError.
    """
    result = TraceResult()

    def tell(note: str) -> None:
        result.notes.append(note)
        if on_note is not None:
            on_note(note)

    questions = await asyncio.to_thread(read_questions, settings.prompts, settings.limit)
    folder = WorkFolder(settings.work)
    async with connected(settings.large) as large:
        await _begin(folder, settings, questions, large, tell)
        ids = [
            f"{prompt}-{sample}"
            for prompt in range(1, len(questions.items) + 1)
            for sample in range(1, settings.samples + 1)
        ]
        with OrderedLines(folder.traces, ids) as lines:
            for note in lines.told:
                tell(note)
            tracer = _Tracer(settings, questions, large, lines, ids, on_progress, tell)
            await tracer.run()
            result.traces, result.asked, result.refused = lines.done, len(ids), tracer.refused
            result.traces -= tracer.refused
        result.speeds = await _speeds(folder, settings, questions, large, tell)
    return result


async def _begin(
    folder: WorkFolder,
    settings: TraceSettings,
    questions: Questions,
    large: Connected,
    tell: OnNote,
) -> None:
    made_from = {
        "model": settings.large.model,
        "prompts": Path(questions.source).name,
        "sha256": questions.sha256,
        "questions": len(questions.items),
        "samples": settings.samples,
        "seed": settings.seed,
        "temperature": settings.temperature,
        "sampling": dict(settings.sampling),
        "max_tokens": settings.max_tokens,
        "template": dict(settings.large.template),
    }
    folder.begin("traces", made_from, _REMEDY, fresh=not has_lines(folder.traces))
    tempered = large.info.dialect in _TEMPERED and settings.temperature not in (0, 1)
    now = {**await large.described(), "margins": "after sampling" if tempered else "raw"}
    before = folder.meta().get("large")
    if before and before != now:
        tell(f"the large model's engine is another one than before: {before} then, {now} now")
    if tempered:
        tell(
            f"{large.info.dialect} tells probabilities after temperature {settings.temperature:g}: "
            "the large model's own margins are of these"
        )
    folder.note(version=1, large=now)


class _Tracer:
    def __init__(
        self,
        settings: TraceSettings,
        questions: Questions,
        large: Connected,
        lines: OrderedLines,
        ids: list[str],
        on_progress: OnProgress,
        tell: OnNote,
    ) -> None:
        self._settings = settings
        self._questions = questions
        self._large = large
        self._lines = lines
        self._ids = ids
        self._on_progress = on_progress
        self._tell = tell
        self._went_well = lines.done > 0
        self._sampling = _sampling(settings)
        self.refused = 0

    async def run(self) -> None:
        self._on_progress(self._lines.done, len(self._ids))
        async with sdk(self._large) as client:

            async def one(index: int) -> None:
                await self._one(client, index)

            await spread(self._lines.missing(), one, self._settings.concurrency)

    async def _one(self, client: AsyncOpenAI, index: int) -> None:
        try:
            line = await patiently(
                lambda: self._line(client, index), self._settings.patience_s, self._tell
            )
        except RequestError as error:
            self._refuse(index, error)
        else:
            self._went_well = True
            self._lines.put(index, line)
        self._on_progress(self._lines.done, len(self._ids))

    def _refuse(self, index: int, error: RequestError) -> None:
        """One prompt may be too long; what nobody may ask is an error."""
        self.refused += 1
        hopeless = self.refused >= min(_HOPELESS, len(self._ids))
        if passing(error) or (hopeless and not self._went_well):
            raise error
        self._tell(f"prompt {self._ids[index]} was refused, and is left out: {error.message}")
        self._lines.skip(index)

    async def _line(self, client: AsyncOpenAI, index: int) -> str:
        """The trace of one generation, as a line."""
        question = self._questions.items[index // self._settings.samples].text
        prompt = await self._large.prompt(question)
        request = decode_request((), self._budget(prompt), self._settings.seed + index)
        found = await record(client, self._large, prompt, request, self._sampling)
        made = Trace(
            id=self._ids[index],
            question=question,
            prompt=await self._large.text(prompt),
            prompt_ids=prompt.ids or (),
            texts=tuple(found.texts),
            ids=tuple(found.ids),
            margins=tuple(_rounded(value) for value in found.margins),
            finish=found.finish,
            first_s=found.first_s,
            total_s=found.total_s,
        )
        return trace_line(made, found)

    def _budget(self, prompt: Prompt) -> int:
        """The limit of tokens, within what the context holds."""
        most, context = self._settings.max_tokens, self._large.info.context
        if context is None or prompt.ids is None:
            return most
        left = context - len(prompt.ids)
        if left < 1:
            raise RequestError(f"its {len(prompt.ids)} tokens fill the context of {context}")
        return min(most, left)


def trace_line(trace: Trace, found: Recording) -> str:
    """A trace's line; `hits` beside it: whether each token was the large model's likeliest."""
    record = {**asdict(trace), "hits": found.hits}
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _sampling(settings: TraceSettings) -> Sampling:
    fields = {"temperature": settings.temperature, **settings.sampling}
    return Sampling(fields, _LOGPROBS)


async def _speeds(
    folder: WorkFolder,
    settings: TraceSettings,
    questions: Questions,
    large: Connected,
    tell: OnNote,
) -> dict[str, Any] | None:
    """Measured once; None where there is no small model yet."""
    known = folder.meta().get("speeds")
    if known or settings.small is None:
        return known
    texts = [question.text for question in questions.items]
    try:
        async with connected(settings.small) as small:
            speeds = await measured(large, small, texts, _sampling(settings))
            folder.note(speeds=speeds, small=await small.described())
    except GatewayError as error:
        tell(f"speeds were not measured, the next run does it: {error.message}")
        return None
    return speeds

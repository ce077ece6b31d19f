"""`relaygen calibrate`: its stages, one after the other."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gateway.calibrate.arguments import REFERENCE_RULE
from gateway.calibrate.evidence import Calibration, calibrated
from gateway.calibrate.files import WorkFolder, WorkFolderError
from gateway.calibrate.policy_file import policy_text
from gateway.calibrate.questions import QuestionsError
from gateway.calibrate.scoring import ScoreSettings, score
from gateway.calibrate.selecting import Files
from gateway.calibrate.sides import Side
from gateway.calibrate.tracing import TraceSettings, trace
from gateway.connections import Connections
from gateway.errors import GatewayError, RequestError
from gateway.settings import SettingsError, Timeouts
from gateway.upstream import Upstream
from relaygen.calibration.selection import Choice, Rule
from relaygen.calibration.traces import BadLineError

_KEYS = "RELAYGEN_BACKENDS__{}__API_KEY"


def run(options: argparse.Namespace) -> int:
    """Returns the exit status; what the user can mend goes to standard error."""
    try:
        asyncio.run(_Run(options).stages())
    except (GatewayError, QuestionsError, WorkFolderError, BadLineError) as error:
        print(f"calibrate: {getattr(error, 'message', error)}", file=sys.stderr)
        return 1
    return 0


class _Run:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._console = Console()
        out: Path = options.out
        self._work = options.work or out.with_name(f"{out.stem}.calibration")

    async def stages(self) -> None:
        stage = self._options.stage
        if stage in ("all", "trace"):
            await self._trace()
        if stage in ("all", "score"):
            await self._score()
        if stage in ("all", "select", "report"):
            self._conclude(write=stage != "report", report=stage != "select")

    # ---- with engines ---------------------------------------------------------------------------

    async def _trace(self) -> None:
        options = self._options
        if not options.prompts:
            raise SettingsError("calibrate: --prompts is missing; give FILE.jsonl or hf:DATASET")
        small = await self._side("small") if options.small else None
        sampling = {"top_p": options.top_p, "top_k": options.top_k}
        settings = TraceSettings(
            work=self._work,
            prompts=options.prompts,
            large=await self._side("large"),
            small=small,
            samples=options.samples,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            sampling={key: value for key, value in sampling.items() if value is not None},
            seed=options.seed,
            concurrency=options.concurrency,
            limit=options.limit,
        )
        with self._progress("tracing") as advance:
            result = await trace(settings, advance, self._note)
        self._console.print(f"{result.traces} traces of {result.asked} in {self._work}")

    async def _score(self) -> None:
        options = self._options
        settings = ScoreSettings(
            work=self._work,
            scorer=options.scorer,
            side=None if options.scorer == "large" else await self._side("small"),
            concurrency=options.concurrency,
            on_bad=options.on_bad_line,
        )
        with self._progress("scoring") as advance:
            result = await score(settings, advance, self._note)
        self._console.print(f"{result.scores} of {result.traces} traces scored: {result.how}")

    async def _side(self, role: str) -> Side:
        options = self._options
        url = getattr(options, role)
        if not url:
            raise SettingsError(f"calibrate: --{role} is missing; give its server's URL")
        key = os.environ.get(_KEYS.format(role.upper()))
        model = getattr(options, f"{role}_model") or await first_model(url, key)
        tokenizer = getattr(options, f"{role}_tokenizer")
        return Side(url=url, model=model, api_key=key, tokenizer=tokenizer)

    # ---- without --------------------------------------------------------------------------------

    def _conclude(self, *, write: bool, report: bool) -> None:
        options = self._options
        folder = WorkFolder(self._work)
        files = Files(folder.traces, folder.scores(options.scorer), options.on_bad_line)
        for path in (files.traces, files.scores):
            if not path.is_file():
                raise WorkFolderError(f"{path} is not there; run the earlier stages first")
        with self._progress_of_bytes() as on_progress:
            found = calibrated(files, self._plan(folder.meta()), on_progress)
        for note in found.notes:
            self._note(note)
        text = policy_text(options.out, found.words, force=options.force or not write)
        if write:
            _put(options.out, text)
        self._show(found, text, report=report)
        if write:
            self._console.print(f"policy written: {options.out}", soft_wrap=True)

    def _plan(self, meta: dict[str, Any]) -> Calibration:
        options = self._options
        rule = Rule.MARGIN if options.rule == REFERENCE_RULE else Rule(options.rule)
        choice = Choice(
            rule=rule,
            sure=options.sure,
            least=options.least,
            occurrences=options.occurrences,
        )
        return Calibration(
            name=options.name or options.out.stem,
            choice=choice,
            by_reference=options.rule == REFERENCE_RULE,
            scorer=options.scorer,
            date=datetime.now(UTC).date().isoformat(),
            meta=meta,
        )

    def _show(self, found: Any, policy: str, *, report: bool) -> None:
        from gateway.calibrate.report import MissingExtraError, tables, write_report

        evidence = found.evidence(policy)
        for table in tables(evidence):
            self._console.print(table)
            self._console.print()
        if not report:
            return
        try:
            paths = write_report(evidence, self._work / "report")
        except MissingExtraError as error:
            self._note(str(error))
            paths = [self._work / "report" / "report.html"]
        self._console.print(f"report: {paths[0]}", soft_wrap=True)

    # ---- what is shown --------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self._console.print(f"note: {text}", markup=False, soft_wrap=True)

    @contextmanager
    def _progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        with _bar(self._console) as progress:
            task = progress.add_task(what, total=None)

            def advance(done: int, total: int) -> None:
                progress.update(task, completed=done, total=total)

            yield advance

    @contextmanager
    def _progress_of_bytes(self) -> Iterator[Callable[[str, int, int], None]]:
        with _bar(self._console) as progress:
            tasks: dict[str, Any] = {}

            def advance(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = progress.add_task(f"reading, {what}", total=total)
                progress.update(tasks[what], completed=done)

            yield advance


def _put(path: Path, text: str) -> None:
    """The whole file or the old one, whenever the process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


async def first_model(url: str, key: str | None) -> str:
    """The model that a server lists first. Raises GatewayError where it lists none."""
    async with Connections(Timeouts()) as connections:
        listed = await Upstream(connections, url.rstrip("/").removesuffix("/v1"), key).get(
            "/v1/models"
        )
    models = [model["id"] for model in listed.get("data") or ()]
    if not models:
        raise RequestError(f"{url} lists no model; name one with --large-model or --small-model")
    return str(models[0])


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )

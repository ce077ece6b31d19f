"""The select stage on a big trace file: its peak memory and its time.

    python benchmarks/calibrate_memory.py [--gib 2]

Made-up traces, a few hundred that are repeated under ids of their own, and their scores, in a
temporary folder. The stage runs in a process of its own, whose memory is measured (on Linux).
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

from gateway.calibrate.selecting import Files, Found, select_cues
from relaygen.calibration.selection import Choice
from relaygen.calibration.traces import Score, Trace, to_line
from relaygen.policy import Policy

VARIED = 300
TOKENS = 2000
SEED = 7
GIB = 2**30
MIB = 2**20

OPENERS = (
    *("Wait", "Now", "Now,", "So", "So,", "Thus", "Therefore,", "Let me", "Let me check", "But"),
    *("First", "Then", "Next,", "Hmm,", "Also", "The", "If", "We", "I", "Maybe", "Zuerst", "所以"),
)
EASY = {"Thus", "Therefore,", "Next,", "Zuerst", "所以"}
SYLLABLES = (
    *("ra", "ni", "so", "the", "ber", "ch", "lo", "am", "ix", "ü", "re", "st", "ing", "qu", "no"),
    *("tion", "al", "ve", "der", "ma", "ti", "con", "pre", "est", "un", "ity", "ous", "ly", "w"),
)
ENDS = (*[(".",)] * 6, ("!",), ("?",), (" 3", ".", "14", "."), (":", "\n\n"), (".\n",), (" 4", "."))


# ---- made-up traces -----------------------------------------------------------------------------


@dataclass(slots=True)
class Tokens:
    """Of a trace: texts, and the scorer's margins and hits."""

    texts: list[str] = field(default_factory=list)
    margins: list[float | None] = field(default_factory=list)
    hits: list[bool | None] = field(default_factory=list)

    def add(self, rng: random.Random, texts: Iterable[str], *, easy: bool) -> None:
        for text in texts:
            self.texts.append(text)
            self.margins.append(_margin(rng) if not easy else 1 - rng.random() / 1000)
            self.hits.append(easy or rng.random() < 0.97)


def _margin(rng: random.Random) -> float | None:
    return None if rng.random() < 0.01 else 1.0 - rng.random() ** 4


def _vocabulary(rng: random.Random) -> list[str]:
    return [
        " " * (rng.random() < 0.8) + "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))
        for _ in range(4000)
    ]


def _sentence(rng: random.Random, opener: str, words: list[str]) -> list[str]:
    first, *others = opener.replace(",", " ,").split(" ")
    tokens = [f" {first}", *(other if other == "," else f" {other}" for other in others)]
    return [*tokens, *rng.choices(words, k=rng.randint(4, 28)), *rng.choice(ENDS)]


def _pair(rng: random.Random, words: list[str]) -> tuple[Trace, Score]:
    tokens = Tokens()
    tokens.add(rng, ["<think>", "\n"], easy=True)
    while len(tokens.texts) < TOKENS * rng.uniform(0.9, 1.0):
        opener = rng.choice(OPENERS)
        tokens.add(rng, _sentence(rng, opener, words), easy=opener in EASY)
    tokens.add(rng, ["</think>", "\n\n", "The", " answer", " is", " 446", "."], easy=True)
    trace = Trace(
        id="?",
        question="What is it?",
        prompt="What is it?",
        prompt_ids=tuple(range(12)),
        texts=tuple(tokens.texts),
        ids=tuple(rng.randrange(150_000) for _ in tokens.texts),
        margins=tuple(_margin(rng) for _ in tokens.texts),
        finish="stop",
        first_s=0.05,
        total_s=9.0,
    )
    return trace, Score("?", "made up", tuple(tokens.margins), tuple(tokens.hits))


@dataclass(frozen=True, slots=True)
class Lines:
    """What a file repeats: lines without the id."""

    traces: list[str]
    scores: list[str]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Lines of traces and scores, without end."""
        number = 0
        while True:
            for trace, score in zip(self.traces, self.scores, strict=True):
                head = f'{{"id":"made-up-{number:08}",'
                yield head + trace, head + score
                number += 1


def _lines() -> Lines:
    rng = random.Random(SEED)
    words = _vocabulary(rng)
    pairs = [_pair(rng, words) for _ in range(VARIED)]
    without_id = [[to_line(record).partition(",")[2] + "\n" for record in pair] for pair in pairs]
    return Lines([trace for trace, _ in without_id], [score for _, score in without_id])


def _write(files: Files, size: int, progress: Progress) -> None:
    task = progress.add_task("writing", total=size)
    with (
        files.traces.open("w", encoding="utf-8") as traces,
        files.scores.open("w", encoding="utf-8") as scores,
    ):
        written = 0
        for trace, score in _lines().pairs():
            traces.write(trace)
            scores.write(score)
            written += len(trace)
            progress.update(task, completed=written)
            if written >= size:
                return


# ---- the stage, in a process of its own ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    found: Found
    seconds: float
    peak: int  # bytes


def _select(files: Files, out: Connection) -> None:
    told = 0.0

    def tell(what: str, done: int, total: int) -> None:
        nonlocal told
        if done == total or time.monotonic() - told > 0.2:
            told = time.monotonic()
            out.send((what, done, total))

    start = time.monotonic()
    found = select_cues(files, Choice(), _policy(), tell)
    seconds = time.monotonic() - start
    out.send(Measured(found, seconds, _peak()))


def _peak() -> int:
    """Of this process alone; getrusage counts what its parent had when it was started."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _policy() -> Policy:
    return Policy.model_validate(
        {
            "version": 1,
            "name": "made-up",
            "large": {"backend": "large", "model": "L"},
            "small": {"backend": "small", "model": "S"},
            "cues": {"words": []},
        }
    )


def _measured(files: Files, progress: Progress) -> Measured:
    here, there = multiprocessing.Pipe(duplex=False)
    # Not forked: it would begin with the parent's memory.
    process = multiprocessing.get_context("spawn").Process(target=_select, args=(files, there))
    process.start()
    there.close()
    tasks: dict[str, TaskID] = {}
    try:
        while not isinstance(told := here.recv(), Measured):
            what, done, total = told
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done)
    except EOFError:
        raise SystemExit("the stage failed; its error is above") from None
    finally:
        process.join()
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0, metavar="N", help="size of the traces")
    size = int(parser.parse_args().gib * GIB)
    console = Console()
    columns = (
        *(TextColumn("{task.description:>10}"), BarColumn(), TaskProgressColumn()),
        *(TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()),
    )
    with tempfile.TemporaryDirectory() as folder, Progress(*columns, console=console) as progress:
        files = Files(Path(folder, "traces.jsonl"), Path(folder, "scores.jsonl"))
        _write(files, size, progress)
        read = files.traces.stat().st_size + files.scores.stat().st_size
        found = _measured(files, progress)
    selection = found.found.selection
    console.print(
        f"{read / GIB:.2f} GiB, {selection.traces} traces, {selection.tokens} tokens of thinking: "
        f"{len(selection.cues)} candidates, {len(selection.chosen)} chosen\n"
        f"peak memory {found.peak / MIB:.0f} MiB, {found.seconds:.0f} s, "
        f"{read / MIB / found.seconds:.1f} MiB/s"
    )


if __name__ == "__main__":
    main()

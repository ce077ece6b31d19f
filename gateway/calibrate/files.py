"""The work folder: what was recorded of a pair, kept so that a killed run goes on where it was.

traces.jsonl            one trace a line, in the order of the prompts
scores-SCORER.jsonl     one score a line, in the order of the traces
*.waiting               lines that are done before those in front of them
meta.json               what the lines were made from, and by what
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import orjson

from relaygen.calibration.traces import BadLineError, OnBadLine

_SYNC_S = 1.0
"""At most so much work is lost to a power cut; to a kill, nothing that is done."""
_BLOCK = 1 << 16
_WAITING = ".waiting"


class WorkFolderError(Exception):
    """The folder can't be gone on with; the message says why and what to do."""


class WorkFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorkFolderError(f"{path} can't be made a folder: {error}") from error

    @property
    def traces(self) -> Path:
        return self.path / "traces.jsonl"

    def scores(self, scorer: str) -> Path:
        return self.path / f"scores-{scorer}.jsonl"

    @property
    def _meta(self) -> Path:
        return self.path / "meta.json"

    def meta(self) -> dict[str, Any]:
        """What is known of the folder's lines; empty for a new folder."""
        try:
            found = json.loads(self._meta.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise WorkFolderError(f"{self._meta}: not JSON ({error}); restore it") from None
        if not isinstance(found, dict):
            raise WorkFolderError(f"{self._meta}: no JSON object; restore it")
        return found

    def note(self, **sections: Any) -> None:
        """Puts sections into meta.json, whole or not at all."""
        text = json.dumps({**self.meta(), **sections}, indent=2, ensure_ascii=False)
        draft = self._meta.with_suffix(".json.draft")
        with draft.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._meta)

    def begin(
        self, section: str, made_from: Mapping[str, Any], remedy: str, *, fresh: bool
    ) -> None:
        """Notes what lines are made from; `fresh`: there are none yet.

        WorkFolderError where those there are of something else: two sets of lines in one file
        would be a set of neither.
        """
        before, now = self.meta().get(section), json.loads(json.dumps(made_from))
        if before is None or fresh:
            self.note(**{section: now})
            return
        differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if differing:
            told = "; ".join(
                f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in differing
            )
            raise WorkFolderError(f"{self.path} was begun with other settings ({told}); {remedy}")


# ---- reading ------------------------------------------------------------------------------------


def stream_lines(path: Path, told: list[str] | None = None) -> Iterator[str]:
    """The lines of a file, one at a time. A last one without its end is left out and told."""
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                yield line
            elif told is not None:
                told.append(f"{path}, line {number}: torn by a kill, left out")


def line_ids(path: Path, on_bad: OnBadLine = "stop") -> Iterator[str]:
    """The ids of a file's records, without the records being kept."""
    for number, line in enumerate(stream_lines(path), 1):
        try:
            if line.strip():
                yield _id(line, path, number)
        except BadLineError:
            if on_bad == "stop":
                raise


def _id(line: str | bytes, path: Path, number: int) -> str:
    try:
        return str(orjson.loads(line)["id"])
    except (KeyError, TypeError, ValueError) as error:
        problem = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        raise BadLineError(
            f"{path}, line {number}: no record of ours: {problem}; delete the line: the run makes "
            "it anew"
        ) from None


# ---- writing ------------------------------------------------------------------------------------


class OrderedLines:
    """Writes the lines of some ids in their order, in whatever order they get done.

    A line that is done early waits in a file of its own. Opening goes on with what is there.
    Raises WorkFolderError where another process writes, BadLineError for a line that is none.
    """

    def __init__(self, path: Path, ids: Sequence[str]) -> None:
        self.path = path
        self._index = {name: i for i, name in enumerate(ids)}
        self._next = 0
        self._skipped: set[int] = set()
        self._places: dict[int, tuple[int, int]] = {}
        self.told: list[str] = []
        """What was mended."""
        self._file = path.open("ab+")
        _lock(self._file, path)
        self._spool = path.with_name(path.name + _WAITING).open("ab+")
        self._synced = time.monotonic()
        for file in (self._file, self._spool):
            if cut := _cut_torn_line(file):
                self.told.append(f"{file.name}: the last line was torn by a kill: {cut} bytes cut")
        self._take_over()
        self._drain()

    def __enter__(self) -> OrderedLines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._flush(now=True)
        self._file.close()
        self._spool.close()
        if not self._places:
            Path(self._spool.name).unlink(missing_ok=True)

    @property
    def done(self) -> int:
        """Lines that are there, those that wait with them."""
        return self._next + len(self._places)

    def missing(self) -> Iterator[int]:
        """The indices of the ids whose lines are not there."""
        return (i for i in self._index.values() if self.misses(i))

    def misses(self, index: int) -> bool:
        return index >= self._next and index not in self._places

    def index(self, name: str) -> int | None:
        """Where an id's line belongs; None for an id that was not asked for."""
        return self._index.get(name)

    def put(self, index: int, line: str) -> None:
        """A line for an id, by its index. The line is on its way to the disk when this returns."""
        data = line.encode("utf-8", "surrogatepass") + b"\n"
        if index == self._next:
            self._file.write(data)
            self._next += 1
            self._drain()
        else:
            self._wait(index, data)
        self._flush()

    def skip(self, index: int) -> None:
        """There will be no line for an id, in this run."""
        self._skipped.add(index)
        self._drain()

    def _wait(self, index: int, data: bytes) -> None:
        start = self._spool.seek(0, os.SEEK_END)
        self._spool.write(data)
        self._places[index] = (start, len(data))

    def _drain(self) -> None:
        """Moves what waited for its turn to the end of the file."""
        moved = False
        while self._next in self._places or self._next in self._skipped:
            if self._next in self._places:
                start, length = self._places.pop(self._next)
                self._spool.seek(start)
                self._file.write(self._spool.read(length))
                moved = True
            self._next += 1
        if moved and not self._places:
            self._flush(now=True)
            self._spool.truncate(0)

    def _flush(self, *, now: bool = False) -> None:
        self._file.flush()
        self._spool.flush()
        if now or time.monotonic() - self._synced > _SYNC_S:
            os.fsync(self._spool.fileno())
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    # ---- what is there --------------------------------------------------------------------------

    def _take_over(self) -> None:
        for _, offset, line, index in self._records(self._spool):
            self._places.setdefault(index, (offset, len(line)))
        for number, offset, _, index in self._records(self._file):
            if index < self._next:
                raise WorkFolderError(
                    f"{self.path}, line {number}: its id was there before; delete the line"
                )
            if index != self._next:
                self._reopen(offset)
                break
            self._next += 1
        self._places = {i: place for i, place in self._places.items() if i >= self._next}

    def _records(self, file: BinaryIO) -> Iterator[tuple[int, int, bytes, int]]:
        """Number, offset and bytes of each line, and its index among the ids."""
        file.seek(0)
        offset = 0
        for number, line in enumerate(file, 1):
            name = _id(line, Path(file.name), number)
            if name not in self._index:
                raise WorkFolderError(
                    f"{file.name}, line {number}: id {name!r} is none of those asked for; work in "
                    "another folder, or delete the file"
                )
            yield number, offset, line, self._index[name]
            offset += len(line)

    def _reopen(self, offset: int) -> None:
        """Lines are missing before this offset: what follows waits until they are there."""
        self._file.seek(offset)
        for line in self._file:
            index = self._index[_id(line, self.path, 0)]
            if index not in self._places:
                self._wait(index, line)
        self._flush(now=True)
        self._file.truncate(offset)
        self.told.append(f"{self.path}: lines are missing in the middle; they are made anew")


def has_lines(path: Path) -> bool:
    """Whether anything is there to go on with, be it only waiting."""
    files = (path, path.with_name(path.name + _WAITING))
    return any(file.is_file() and file.stat().st_size > 0 for file in files)


def _lock(file: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise WorkFolderError(
            f"{path} is being written by another process; wait for it, or take another folder"
        ) from None


def _cut_torn_line(file: BinaryIO) -> int:
    """Cuts a last line that has no end; returns how many bytes that were."""
    end = whole = file.seek(0, os.SEEK_END)
    while whole:
        start = max(0, whole - _BLOCK)
        file.seek(start)
        at = file.read(whole - start).rfind(b"\n")
        if at >= 0:
            whole = start + at + 1
            break
        whole = start
    if whole < end:
        file.truncate(whole)
    return end - whole

"""The prompts to trace: a JSONL file, or a data set of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HUB = "hf:"
_FIELDS = ("question", "problem")
_READABLE = (".jsonl", ".parquet")


class QuestionsError(Exception):
    """No prompts there; the message names file, line, field and remedy."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Questions:
    """`sha256` is of the file's bytes, or of those of all files of the data set's split."""

    source: str
    sha256: str
    items: tuple[Question, ...]


def read_questions(source: str, limit: int | None = None) -> Questions:
    """The prompts of `FILE.jsonl` or `hf:OWNER/NAME[:SPLIT]`; the first `limit` of them.

    A line has `question` or `problem`, and perhaps `answer`. Raises QuestionsError.
    """
    files = _hub_files(source) if source.startswith(_HUB) else [Path(source)]
    digest = hashlib.sha256()
    items: list[Question] = []
    for file in files:
        _add(digest, file)
        for question in _read(file):
            if limit is None or len(items) < limit:
                items.append(question)
    if not items:
        raise QuestionsError(f"{source}: no prompts; write a line {{'question': ...}} for each")
    return Questions(source, digest.hexdigest(), tuple(items))


def _add(digest: Any, file: Path) -> None:
    try:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise QuestionsError(
            f"{file}: can't be read ({error.strerror}); name a JSONL file, or hf:OWNER/NAME:SPLIT"
        ) from error


def _read(file: Path) -> Iterator[Question]:
    if file.suffix == ".parquet":
        return _questions(_parquet_rows(file), file, "row")
    return _questions(_json_rows(file), file, "line")


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open(encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, json.loads(line)
        except UnicodeDecodeError as error:
            raise QuestionsError(f"{file}: not UTF-8 text ({error}); convert it") from None
        except ValueError as error:
            raise QuestionsError(
                f"{file}, line {number}: not JSON ({error}); write one object a line"
            ) from None


def _questions(rows: Iterable[tuple[int, Any]], file: Path, word: str) -> Iterator[Question]:
    for number, row in rows:
        where = f"{file}, {word} {number}"
        if not isinstance(row, dict):
            raise QuestionsError(f"{where}: no object; write {{'question': ...}}")
        field = next((name for name in _FIELDS if name in row), None)
        if field is None:
            known = ", ".join(row) or "no fields"
            raise QuestionsError(
                f"{where}: neither `question` nor `problem` (it has {known}); rename the field"
            )
        text = row[field]
        if not isinstance(text, str) or not text.strip():
            raise QuestionsError(f"{where}, field {field}: expected a text, got {text!r}")
        answer = row.get("answer")
        yield Question(text, None if answer is None else str(answer))


# ---- the hub ------------------------------------------------------------------------------------


def _hub_files(source: str) -> list[Path]:
    """The files of a split, from the hub or its cache."""
    name, _, split = source.removeprefix(_HUB).partition(":")
    try:
        from huggingface_hub import HfApi, hf_hub_download
    except ImportError as error:
        raise QuestionsError(
            f"{source}: huggingface-hub is not installed ({error}); run: pip install "
            "huggingface-hub, or name a JSONL file"
        ) from error
    try:
        found = HfApi().list_repo_files(name, repo_type="dataset")
        chosen = _of_split(source, found, split)
        return [Path(hf_hub_download(name, file, repo_type="dataset")) for file in chosen]
    except QuestionsError:
        raise
    except Exception as error:
        # The hub's errors, httpx's and the socket's share no other ancestor.
        raise QuestionsError(
            f"{source}: can't be fetched from the Hugging Face hub ({type(error).__name__}: "
            f"{_first_line(error)}); check the name and the network, or save the data set as JSONL "
            "and name that file"
        ) from error


def _of_split(source: str, files: list[str], split: str) -> list[str]:
    """Files whose path tells the split ("main/test" where a data set has several parts)."""
    readable = sorted(file for file in files if file.endswith(_READABLE))
    chosen = [file for file in readable if split in file] if split else readable
    sets = {_set_of(file) for file in chosen}
    if len(sets) == 1:
        return chosen
    among = ", ".join(sorted({_set_of(file) for file in readable})) or "no .jsonl or .parquet"
    how = "no files of that split" if not chosen else "more than one split"
    raise QuestionsError(f"{source}: {how}; there are: {among}; write hf:OWNER/NAME:ONE_OF_THEM")


def _set_of(file: str) -> str:
    """A path without what numbers the parts of a split: main/test-00000-of-00001.parquet."""
    path = Path(file)
    return str(path.with_name(path.stem.partition("-0")[0]))


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        from pyarrow.parquet import ParquetFile  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise QuestionsError(
            f"{file}: parquet files need pyarrow; run: pip install pyarrow, or save it as JSONL"
        ) from error
    number = 0
    for batch in ParquetFile(file).iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield number, row


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]

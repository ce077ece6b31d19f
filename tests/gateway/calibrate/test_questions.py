"""Where prompts come from, and what is said of those that are none."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from gateway.calibrate.questions import Question, QuestionsError, read_questions


def test_a_file_of_questions_and_problems(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "One?", "answer": 3}\n\n{"problem": "Two?", "more": [1]}\n')
    found = read_questions(str(path))
    assert found.items == (Question("One?", "3"), Question("Two?"))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_questions(str(path), limit=1).items == (Question("One?", "3"),)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: no object"),
        ('{"prompt": "x"}', r"line 2: neither `question` nor `problem` \(it has prompt\)"),
        ('{"question": 5}', "line 2, field question: expected a text, got 5"),
        ('{"problem": " "}', "line 2, field problem: expected a text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"question": "One?"}}\n{line}\n')
    with pytest.raises(QuestionsError, match=says):
        read_questions(str(path))


def test_no_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match=r"none\.jsonl: can't be read \(No such file"):
        read_questions(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(QuestionsError, match="no prompts"):
        read_questions(str(tmp_path / "empty.jsonl"))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(QuestionsError, match="not UTF-8"):
        read_questions(str(tmp_path / "p.jsonl"))


class _Hub:
    """A hub with one data set."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder, self.files = folder, files

    def list_repo_files(self, name: str, repo_type: str) -> list[str]:
        assert (name, repo_type) == ("owner/set", "dataset")
        return self.files

    def download(self, name: str, file: str, repo_type: str) -> str:
        path = self.folder / file.replace("/", "_")
        path.write_text(f'{{"question": "{file}?"}}\n')
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Hub:
    hub = _Hub(tmp_path, ["README.md", "train.jsonl", "main/test-00000-of-00001.jsonl"])
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub.download)
    return hub


def test_a_split_of_a_data_set(hub: _Hub) -> None:
    found = read_questions("hf:owner/set:test")
    assert found.items == (Question("main/test-00000-of-00001.jsonl?"),)


@pytest.mark.parametrize(("split", "says"), [("", "more than one split"), (":x", "no files of")])
def test_the_splits_are_named_where_none_is_meant(hub: _Hub, split: str, says: str) -> None:
    with pytest.raises(QuestionsError, match=f"{says}.*there are: main/test, train;"):
        read_questions(f"hf:owner/set{split}")


def test_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fails)
    with pytest.raises(QuestionsError, match=r"ConnectionError: no route.*save the data set as"):
        read_questions("hf:owner/set:test")

"""The policy store: what is read, read again, refused and kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from gateway.policies import PolicyStore


def write(path: Path, name: str = "pair", **changes: Any) -> None:
    policy = {
        "version": 1,
        "name": name,
        "large": {"backend": "large", "model": "big"},
        "small": {"backend": "small", "model": "tiny"},
        "cues": {"words": ["Now"]},
        **changes,
    }
    text = yaml.safe_dump(policy)
    path.write_text(text, encoding="utf-8")
    touch(path)


def touch(path: Path) -> None:
    """A time of change of its own, however coarse the file system's clock."""
    touch.now += 10**9  # type: ignore[attr-defined]
    os.utime(path, ns=(touch.now, touch.now))  # type: ignore[attr-defined]


touch.now = 10**18  # type: ignore[attr-defined]


def loaded(folder: Path, *files: Path) -> PolicyStore:
    store = PolicyStore(folder, files)
    store.load()
    return store


def test_reads_the_yaml_and_json_of_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "a")
    write(tmp_path / "b.yml", "b")
    write(tmp_path / "c.json", "c")
    (tmp_path / "notes.txt").write_text("no policy")
    (tmp_path / "folder.yaml").mkdir()
    assert set(loaded(tmp_path).by_name) == {"a", "b", "c"}


def test_reads_only_the_files_it_is_given(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "a")
    write(tmp_path / "b.yaml", "b")
    assert set(loaded(tmp_path, tmp_path / "b.yaml").by_name) == {"b"}


def test_a_folder_that_is_not_there_has_no_policies(tmp_path: Path) -> None:
    assert loaded(tmp_path / "nowhere").by_name == {}


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", min_large_tokens=1)
    store = loaded(tmp_path)
    write(tmp_path / "a.yaml", min_large_tokens=9)
    store.load()
    assert store.by_name["pair"].min_large_tokens == 9


def test_a_renamed_policy_goes_by_its_new_name_alone(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "old")
    store = loaded(tmp_path)
    write(tmp_path / "a.yaml", "new")
    store.load()
    assert set(store.by_name) == {"new"}


def test_a_file_that_turns_bad_is_refused_and_the_old_policy_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    write(path)
    store = loaded(tmp_path)
    old = store.by_name["pair"]
    write(path, min_large_tokens="many")
    store.load()
    assert store.by_name["pair"] is old
    [problem] = store.problems[str(path)]
    assert "min_large_tokens" in problem
    write(path)
    store.load()
    assert store.problems == {}


def test_a_policy_in_use_is_not_changed_by_a_reload(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", min_large_tokens=1)
    store = loaded(tmp_path)
    in_use = store.by_name
    write(tmp_path / "a.yaml", min_large_tokens=9)
    store.load()
    assert in_use["pair"].min_large_tokens == 1


def test_a_removed_file_takes_its_policy_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    write(path)
    write(tmp_path / "bad.yaml", cues="none")
    store = loaded(tmp_path)
    path.unlink()
    (tmp_path / "bad.yaml").unlink()
    store.load()
    assert store.by_name == {}
    assert store.problems == {}


def test_a_named_file_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    store = loaded(tmp_path, path)
    assert "can't be read" in store.problems[str(path)][0]
    write(path)
    store.load()
    assert set(store.by_name) == {"pair"}


def test_two_files_with_one_name_the_second_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", min_large_tokens=1)
    write(tmp_path / "b.yaml", min_large_tokens=2)
    store = loaded(tmp_path)
    assert store.by_name["pair"].min_large_tokens == 1
    assert "already the name of" in store.problems[str(tmp_path / "b.yaml")][0]


def test_a_refused_name_is_taken_when_it_becomes_free(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml")
    store = loaded(tmp_path)
    shutil.copy(tmp_path / "a.yaml", tmp_path / "b.yaml")
    store.load()
    assert store.problems
    (tmp_path / "a.yaml").unlink()
    store.load()
    assert set(store.by_name) == {"pair"}
    assert store.problems == {}


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"name: \xff")
    assert "UTF-8" in loaded(tmp_path).problems[str(tmp_path / "a.yaml")][0]


def test_a_file_larger_than_any_policy_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    with (tmp_path / "a.yaml").open("wb") as file:
        file.truncate(2**40)  # a hole: takes no room on the disk
    assert "too large" in loaded(tmp_path).problems[str(tmp_path / "a.yaml")][0]


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.yaml")
    assert "no regular file" in loaded(tmp_path).problems[str(tmp_path / "a.yaml")][0]

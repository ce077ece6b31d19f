"""Lines in order, whatever happened to the file and whenever the process died."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from gateway.calibrate.files import OrderedLines, WorkFolder, WorkFolderError, stream_lines
from relaygen.calibration.traces import BadLineError

IDS = ["a", "b", "c", "d"]


def line(name: str, more: str = "") -> str:
    return json.dumps({"id": name, "more": more}, ensure_ascii=False)


def ids_in(path: Path) -> list[str]:
    return [json.loads(text)["id"] for text in path.read_text().splitlines()]


def test_lines_done_early_wait_for_their_turn(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with OrderedLines(path, IDS) as lines:
        lines.put(2, line("c"))
        lines.put(0, line("a"))
        assert ids_in(path) == ["a"]
        assert (lines.done, list(lines.missing())) == (2, [1, 3])
        lines.put(1, line("b"))
        assert ids_in(path) == ["a", "b", "c"]
        lines.put(3, line("d"))
    assert ids_in(path) == IDS
    assert list(tmp_path.iterdir()) == [path]


def test_what_waited_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with OrderedLines(path, IDS) as lines:
        lines.put(2, line("c", "é"))
        lines.put(0, line("a"))
    with OrderedLines(path, IDS) as lines:
        assert list(lines.missing()) == [1, 3]
        lines.put(3, line("d"))
        lines.put(1, line("b"))
    assert ids_in(path) == IDS


@pytest.mark.parametrize("torn", ['{"id": "b", "mo', '{"id": "b"}', "x" * 200_000])
def test_a_torn_last_line_is_cut_off_and_told(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(line("a") + "\n" + torn)
    with OrderedLines(path, IDS) as lines:
        assert lines.told == [f"{path}: the last line was torn by a kill: {len(torn)} bytes cut"]
        assert list(lines.missing()) == [1, 2, 3]
    assert path.read_text() == line("a") + "\n"


def test_a_torn_line_that_waits_is_cut_off_too(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    (tmp_path / "x.jsonl.waiting").write_text(line("c") + "\n" + '{"id"')
    with OrderedLines(path, IDS) as lines:
        assert list(lines.missing()) == [0, 1, 3]


def test_lines_deleted_in_the_middle_are_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(line(name) + "\n" for name in "acd"))
    with OrderedLines(path, IDS) as lines:
        assert list(lines.missing()) == [1]
        assert "in the middle" in lines.told[0]
        lines.put(1, line("b"))
    assert ids_in(path) == IDS


def test_what_is_skipped_holds_nothing_up(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with OrderedLines(path, IDS) as lines:
        lines.put(2, line("c"))
        lines.skip(1)
        lines.put(0, line("a"))
    assert ids_in(path) == ["a", "c"]


@pytest.mark.parametrize("bad", ["{", "[1]", '{"no": "id"}'])
def test_a_corrupt_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{line('a')}\n{bad}\n{line('c')}\n")
    with pytest.raises(BadLineError, match=r"x\.jsonl, line 2: .*delete the line"):
        OrderedLines(path, IDS)


def test_a_line_of_another_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{line('a')}\n{line('z')}\n")
    with pytest.raises(WorkFolderError, match=r"x\.jsonl, line 2: id 'z' is none of those"):
        OrderedLines(path, IDS)


def test_a_line_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f"{line('a')}\n{line('a')}\n")
    with pytest.raises(WorkFolderError, match=r"x\.jsonl, line 2: its id was there before"):
        OrderedLines(path, IDS)


def test_one_process_at_a_time_writes(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with (
        OrderedLines(path, IDS),
        pytest.raises(WorkFolderError, match="being written by another process"),
    ):
        OrderedLines(path, IDS)


def test_lines_are_streamed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    many = [str(i) for i in range(200)]
    with OrderedLines(path, many) as lines:
        for i in reversed(range(200)):  # all but the last one wait
            lines.put(i, line(str(i), "x" * 100_000))
    tracemalloc.start()
    with OrderedLines(path, many) as lines:
        assert lines.done == 200
    assert sum(1 for _ in stream_lines(path)) == 200
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_last_line_without_its_end_is_not_read(tmp_path: Path) -> None:
    path, told = tmp_path / "x.jsonl", list[str]()
    path.write_text('{"id": "a"}\n{"id"')
    assert list(stream_lines(path, told)) == ['{"id": "a"}\n']
    assert told == [f"{path}, line 2: torn by a kill, left out"]


def test_other_settings_do_not_mix_into_a_folder(tmp_path: Path) -> None:
    folder = WorkFolder(tmp_path / "work")
    folder.begin("traces", {"seed": 1, "model": "m"}, "take another folder", fresh=False)
    folder.begin("traces", {"seed": 1, "model": "m"}, "take another folder", fresh=False)
    with pytest.raises(WorkFolderError, match=r"seed: 1 then, 2 now\); take another folder"):
        folder.begin("traces", {"seed": 2, "model": "m"}, "take another folder", fresh=False)
    folder.begin("traces", {"seed": 2}, "take another folder", fresh=True)
    folder.begin("traces", {"seed": 1, "model": "m"}, "take another folder", fresh=True)
    folder.note(speeds={"large_ms": 2})
    assert folder.meta() == {"traces": {"seed": 1, "model": "m"}, "speeds": {"large_ms": 2}}


def test_a_broken_meta_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(WorkFolderError, match=r"meta\.json: not JSON"):
        WorkFolder(tmp_path).meta()

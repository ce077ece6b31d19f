"""The commands that need no engine: policy check, policy schema, replay."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main

TEXT = "I know that 3.14 is close. Now, we go on. Otherwise stop."


@pytest.fixture
def policy(tmp_path: Path) -> Any:
    def write(name: str = "policy.yaml", **changes: Any) -> str:
        content = {
            "version": 1,
            "name": "pair",
            "large": {"backend": "large", "model": "big"},
            "small": {"backend": "small", "model": "tiny"},
            "cues": {"words": ["now", "Now", "Other"]},
            **changes,
        }
        path = tmp_path / name
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return str(path)

    return write


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# ---- policy -------------------------------------------------------------------------------------


def test_a_valid_policy_passes(policy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = policy()
    assert run(capsys, "policy", "check", path) == (0, f"{path}: policy 'pair' is valid\n", "")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"cue": {"words": []}}, "cue"),
        ({"large": {"backend": "large", "modle": "big", "model": "big"}}, "large.modle"),
        ({"min_large_tokens": "five"}, "min_large_tokens"),
        ({"cues": {"words": ["Now", ""]}}, "cues.words[1]"),
        ({"cues": {"words": [" "]}}, "cues.words[0]"),
        ({"cues": {"words": [True]}}, "cues.words[0]"),
        ({"version": 2}, "version"),
        ({"small": None}, "small"),
    ],
)
def test_a_wrong_policy_is_refused_with_file_and_field(
    policy: Any, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], field: str
) -> None:
    path = policy(**changes)
    status, out, err = run(capsys, "policy", "check", path)
    assert (status, out) == (1, "")
    assert f"{path}: {field}: " in err


def test_a_cue_that_never_fires_is_a_warning(
    policy: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = policy(cues={"words": ["So", "So that"]})
    status, out, err = run(capsys, "policy", "check", path)
    assert status == 0
    assert "is valid" in out
    assert f"warning: {path}: cues.words[1]" in err


def test_one_wrong_file_of_many_is_enough(policy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = policy("good.yaml"), policy("bad.yaml", version=2)
    status, out, err = run(capsys, "policy", "check", good, bad)
    assert status == 1
    assert "good.yaml" in out
    assert "bad.yaml" in err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "policy", "check", "/nowhere/x.yaml")
    assert status == 1
    assert "/nowhere/x.yaml" in err


def test_the_schema_is_json_and_knows_what_is_required(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, _ = run(capsys, "policy", "schema")
    assert status == 0
    assert set(json.loads(out)["required"]) == {"version", "name", "large", "small", "cues"}


@pytest.mark.parametrize("file", sorted(Path("policies").glob("*.yaml")), ids=str)
def test_the_shipped_policies_are_valid(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "policy", "check", str(file))
    assert (status, err) == (0, "")


def test_diff_tells_fields_and_cues(policy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"cues": {"Thus": {"count": 12, "mean": 0.9931}}}
    new = policy("b.yaml", cues={"words": ["Now", "now", "Thus"]}, overlap=True, calibration=found)
    assert run(capsys, "policy", "diff", policy("a.yaml"), new) == (
        1,
        "overlap: false -> true\n"
        'cues.words: - "Other"\n'
        'cues.words: + "Thus"  (count 12, mean 0.9931)\n',
        "",
    )


def test_diff_of_the_same_says_nothing(policy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "policy", "diff", policy("a.yaml"), policy("b.yaml")) == (0, "", "")


def test_diff_of_a_wrong_policy_is_trouble(policy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = policy("b.yaml", version=2)
    status, out, err = run(capsys, "policy", "diff", policy("a.yaml"), wrong)
    assert (status, out) == (2, "")
    assert "version" in err


# ---- engine -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "value", "limit"),
    [
        ("--port", "65536", "0 to 65535"),
        ("--port", "-1", "0 to 65535"),
        ("--threads", "0", "1 to"),
        ("--parallel", "x", "1 to"),
        ("--context", "1.5", "1 to"),
    ],
)
def test_an_engines_numbers_are_checked(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, limit: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["engine", "large", flag, value])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert flag in told
    assert repr(value) in told or "expected one argument" in told
    assert limit in told or "expected one argument" in told


# ---- replay -------------------------------------------------------------------------------------

WORDS = [
    ("large", "I know that 3.14 is close. Now", "Now"),
    ("small", ", we go on.", "."),
    ("large", " Otherwise stop.", None),
]
SUBSTRINGS = [
    ("large", "I know", "now"),
    ("small", " that 3.14 is close.", "."),
    ("large", " Now", "Now"),
    ("small", ", we go on.", "."),
    ("large", " Other", "Other"),
    ("small", "wise stop.", "."),
]


def records(out: str) -> list[tuple[Any, ...]]:
    return [tuple(json.loads(line).values()) for line in out.splitlines()]


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def test_replay_cuts_at_whole_words(
    policy: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "replay", "--policy", policy(), "--format", "jsonl", text)
    assert status == 0
    assert records(out) == WORDS
    assert list(json.loads(out.splitlines()[0])) == ["role", "text", "trigger"]


def test_replay_cuts_inside_words_when_told(
    policy: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cues = {"match": "substring", "words": ["now", "Now", "Other"]}
    path = policy(cues=cues, min_large_tokens=0)
    _, out, _ = run(capsys, "replay", "--policy", path, "--format", "jsonl", text)
    assert records(out) == SUBSTRINGS


@pytest.mark.parametrize("file", [["-"], []])
def test_replay_reads_standard_input(
    policy: Any,
    file: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    _, out, _ = run(capsys, "replay", "--policy", policy(), "--format", "jsonl", *file)
    assert records(out) == WORDS


def test_replay_shows_the_segments(
    policy: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "replay", "--policy", policy(), text)
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["large", "small", "large"]
    assert "[Now]" in out


def test_replay_keeps_characters_outside_ascii(
    policy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Grüße aus dem schönen 北京 🎉. Now ja.", encoding="utf-8")
    _, out, _ = run(capsys, "replay", "--policy", policy(), "--format", "jsonl", str(path))
    assert "".join(record[1] for record in records(out)) == "Grüße aus dem schönen 北京 🎉. Now ja."


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_replay_names_a_file_it_cannot_read(
    policy: Any, tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    status, _, err = run(capsys, "replay", "--policy", policy(), str(path))
    assert status == 1
    assert str(path) in err


def test_replay_names_what_is_wrong_with_a_policy(
    policy: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "replay", "--policy", policy(version=3), text)
    assert status == 1
    assert "version" in err


def test_a_wrong_option_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--prot", "1"])
    assert caught.value.code == 2


def test_folder_and_files_of_policies_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--policy", "a.yaml", "--policies", "b"])
    assert caught.value.code == 2

"""The policy that calibration writes, and what it leaves alone in one that is there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gateway.calibrate.policy_file import PolicyWords, policy_text
from gateway.settings import SettingsError
from relaygen.cues import CueMatch
from relaygen.errors import PolicyError
from relaygen.policy import load_policy


def words(*cues: str, match: str = "word") -> PolicyWords:
    return PolicyWords(
        name="large+small",
        large_model="org/Large",
        small_model="org/Small",
        sampling={"temperature": 0.6, "top_k": 20},
        words=cues,
        match=match,
        calibration={
            "date": "2026-01-02",
            "large": {"model": "org/Large", "version": "1.0"},
            "words": list(cues),
            "overall": 0.93,
            "rule": "a rule that is told " * 9,
            "cues": {cue: {"chosen": True, "mean": 0.99} for cue in cues},
        },
    )


EDITED = """\
# mine
version: 1
name: 'our pair'   # quoted
large:   {backend: gpu1,   model: L}
small:
    backend: gpu2    # four blanks
    model: S
min_large_tokens: 7   # seven

# about the cues
cues:
  match: word   # as a word
  words: [Now, "So"]   # beside the list
  # after the list
sampling: {temperature: 0.60, top_p: 1e-1}
calibration:   # by the program
  words: [Now, So]
  cues:
    Now: {mean: 0.1}

# the last word
max_small_tokens: 99
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pair.yaml"


def edited(path: Path, text: str = EDITED) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# ---- a new file ---------------------------------------------------------------------------------


def test_a_new_file_is_a_policy(path: Path) -> None:
    policy = load_policy(policy_text(path, words("Now", "So,")), "f")
    assert (policy.name, policy.cues.words) == ("large+small", ("Now", "So,"))
    assert (policy.large.model, policy.small.backend) == ("org/Large", "small")
    assert policy.sampling == {"temperature": 0.6, "top_k": 20}


def test_it_tells_where_the_cues_come_from(path: Path) -> None:
    found = words("Now")
    assert load_policy(policy_text(path, found), "f").calibration == found.calibration


def test_no_cue_is_a_policy_too(path: Path) -> None:
    found = replace(words(), sampling={}, calibration={})
    policy = load_policy(policy_text(path, found), "f")
    assert (policy.cues.words, policy.sampling, policy.calibration) == ((), {}, {})


def test_the_references_cues_match_and_end_as_its_own_do(path: Path) -> None:
    policy = load_policy(policy_text(path, words("now", match="substring")), "f")
    assert (policy.cues.match, policy.boundary.match) == ("substring", "substring")


cue = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]), min_size=1, max_size=9)
tricky = st.sampled_from(
    ["No", "yes", "Oh,", "null", "1", "- x", "#", "a: b", "'", "所以", "[", "~"]
)


@given(st.lists(cue | tricky, max_size=40, unique=True))
def test_any_cue_comes_back_as_it_is(cues: Sequence[str]) -> None:
    policy = load_policy(policy_text(Path("/nowhere/pair.yaml"), words(*cues)), "f")
    assert policy.cues.words == tuple(cues)
    assert list(policy.calibration["cues"]) == list(cues)


# ---- an old file --------------------------------------------------------------------------------


def test_all_but_the_cues_and_the_calibration_stays_as_it_is(path: Path) -> None:
    text = policy_text(edited(path), replace(words("Thus"), calibration={"words": ["Thus"]}))
    start = EDITED.index("words: [Now, So]\n")
    expected = (
        EDITED[:start].replace('[Now, "So"]', "[Thus]")
        + "words: [Thus]"
        + EDITED[EDITED.index("\n\n# the last word") :]
    )
    assert text == expected


def test_the_new_cues_and_their_provenance_are_in_it(path: Path) -> None:
    found = words("Thus", "No")
    policy = load_policy(policy_text(edited(path), found), "f")
    assert policy.cues.words == ("Thus", "No")
    assert policy.calibration == found.calibration
    assert (policy.name, policy.min_large_tokens, policy.max_small_tokens) == ("our pair", 7, 99)


def test_the_same_cues_are_left_as_they_are_written(path: Path) -> None:
    assert '[Now, "So"]   # beside the list' in policy_text(edited(path), words("Now", "So"))


def test_it_is_the_same_however_often_it_is_run(path: Path) -> None:
    once = policy_text(path, words("Now", "So"))
    assert policy_text(edited(path, once), words("Now", "So")) == once
    again = policy_text(edited(path), words("Thus"))
    assert policy_text(edited(path, again), words("Thus")) == again


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cues:\n  words:\n  - Now  # good\n", "cues:\n  words:\n  - Thus\n  - Hm  # good\n"),
        ("cues:\n    words:\n        - Now\n", "cues:\n    words:\n        - Thus\n        - Hm\n"),
        ("cues: {words: [Now]}  # c\n", "cues: {words: [Thus, Hm]}  # c\n"),
        ("cues:\n  words: [\n    Now,  # good\n  ]\n", "cues:\n  words: [Thus, Hm]\n"),
    ],
)
def test_a_list_keeps_its_form(path: Path, old: str, new: str) -> None:
    head = "version: 1\nname: p\nlarge: {backend: l, model: L}\nsmall: {backend: s, model: S}\n"
    tail = "calibration: {words: [Now]}\n"
    text = policy_text(edited(path, head + old + tail), words("Thus", "Hm"))
    assert text.startswith(f"{head}{new}calibration:\n  date: '2026-01-02'\n")


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "told"),
    [
        ("[Now, So, Wait]", "(+Wait)"),
        ("[Now]", "(-So)"),
        ("[Now, But]", "(+But, -So)"),
        ("[So, Now]", "(order)"),
    ],
)
def test_edited_cues_are_refused_by_name(path: Path, now: str, told: str) -> None:
    edited(path, EDITED.replace('[Now, "So"]', now))
    with pytest.raises(SettingsError) as caught:
        policy_text(path, words("Thus"))
    assert f"--out: {path}: cues.words was edited by hand {told}" in str(caught.value)
    assert "--force" in str(caught.value)


def test_with_force_they_are_overwritten_and_nothing_else(path: Path) -> None:
    edited(path, EDITED.replace('[Now, "So"]', "[Wait]"))
    text = policy_text(path, words("Thus"), force=True)
    assert load_policy(text, "f").cues.words == ("Thus",)
    assert "min_large_tokens: 7   # seven" in text


@pytest.mark.parametrize("calibration", ["", "calibration: {}\n", "calibration:\n  pair: both\n"])
def test_cues_that_calibration_did_not_write_are_refused(path: Path, calibration: str) -> None:
    text = EDITED[: EDITED.index("calibration:")] + calibration
    with pytest.raises(SettingsError, match="has cues that calibration did not write"):
        policy_text(edited(path, text), words("Thus"))
    forced = policy_text(path, words("Thus"), force=True)
    assert load_policy(forced, "f").calibration["words"] == ["Thus"]
    assert forced.startswith(EDITED[: EDITED.index("[Now")])


def test_another_way_to_match_is_refused_until_forced(path: Path) -> None:
    found = words("Now", "So", match="substring")
    with pytest.raises(SettingsError, match=r"cues\.match is word, and the new cues are for sub"):
        policy_text(edited(path), found)
    assert "match: substring   # as a word\n" in policy_text(path, found, force=True)


@pytest.mark.parametrize("cues", ["cues:\n  words: [Now]\n", "cues: {words: [Now]}\n"])
def test_with_force_a_way_to_match_is_added(path: Path, cues: str) -> None:
    head = "version: 1\nname: p\nlarge: {backend: l, model: L}\nsmall: {backend: s, model: S}\n"
    found = words("now", match="substring")
    policy = load_policy(policy_text(edited(path, head + cues), found, force=True), "f")
    assert (policy.cues.match, policy.cues.words) == (CueMatch.SUBSTRING, ("now",))


def test_a_policy_in_json_stays_one(path: Path) -> None:
    old = policy_text(path, words("Now"))
    path.write_text(json.dumps(yaml.safe_load(old)))
    policy = load_policy(policy_text(path, words("Thus")), "f")
    assert (policy.cues.words, policy.calibration["words"]) == (("Thus",), ["Thus"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "not valid YAML"),
        ("a: 1\na: 2\n", "'a' is given twice"),
        ("- a\n", "expected a mapping of keys, got list"),
        ("", "got nothing"),
        ("version: 1\nnmae: x\n", "nmae: unknown key"),
        (EDITED.replace("cues:\n  match", "cues:\n  macth"), "macth: unknown key"),
    ],
)
@pytest.mark.parametrize("force", [False, True])
def test_a_broken_file_is_named(path: Path, text: str, told: str, force: bool) -> None:
    with pytest.raises(PolicyError) as caught:
        policy_text(edited(path, text), words("Thus"), force=force)
    assert str(path) in str(caught.value)
    assert told in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(path: Path) -> None:
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(SettingsError, match=f"{path} can't be read: .*; move it away"):
        policy_text(path, words("Thus"))
    path.unlink()
    path.mkdir()
    with pytest.raises(SettingsError, match="can't be read"):
        policy_text(path, words("Thus"))

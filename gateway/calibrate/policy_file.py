"""The policy that calibration writes: new, or an old one in which all but its words stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from gateway.settings import SettingsError
from relaygen.policy import Policy, load_policy

_HEADER = """\
# Written by `relaygen calibrate`. What is edited by hand is kept when it is run again; only
# `cues` and `calibration` are written anew, and edited cues only with --force.
"""


@dataclass(frozen=True, slots=True)
class PolicyWords:
    """What calibration has to say: the pair, the cues and where they come from."""

    name: str
    large_model: str
    small_model: str
    sampling: Mapping[str, Any]
    words: Sequence[str]
    calibration: Mapping[str, Any]
    match: str = "word"


def policy_text(path: Path, found: PolicyWords, *, force: bool = False) -> str:
    """The file's new content, valid as a policy. SettingsError where it would undo an edit,
    PolicyError where the file is no policy."""
    old = _read(path)
    text = _new(found) if old is None else _renewed(path, old, found, force=force)
    load_policy(text, str(path))
    return text


def _read(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--out: {path} can't be read: {error}; move it away") from None


def _new(found: PolicyWords) -> str:
    inline: dict[str, Any] = {
        "version": 1,
        "name": found.name,
        "large": {"backend": "large", "model": found.large_model},
        "small": {"backend": "small", "model": found.small_model},
    }
    if found.sampling:
        inline["sampling"] = dict(found.sampling)
    cues = {"match": found.match, "words": list(found.words)}
    lines = [f"{key}: {_inline(value)}" for key, value in inline.items()]
    lines += ["cues:", *(f"  {key}: {_inline(value)}" for key, value in cues.items())]
    if found.match == "substring":
        lines.append("boundary: {match: substring}")
    lines.append(f"calibration:{_below(dict(found.calibration), 0)}")
    return _HEADER + "\n".join(lines) + "\n"


def _renewed(path: Path, old: str, found: PolicyWords, *, force: bool) -> str:
    policy = load_policy(old, str(path))
    if not force:
        _refuse_edits(path, policy, found)
    text = old
    if policy.cues.words != tuple(found.words):
        text = _set(text, ("cues", "words"), list(found.words))
    if policy.cues.match != found.match:
        text = _set(text, ("cues", "match"), found.match)
    return _set(text, ("calibration",), dict(found.calibration))


def _refuse_edits(path: Path, policy: Policy, found: PolicyWords) -> None:
    """Cues that calibration did not write are somebody's."""
    written, now = policy.calibration.get("words"), policy.cues.words
    if not isinstance(written, list):
        raise SettingsError(
            f"--out: {path} has cues that calibration did not write; name another file, or "
            "overwrite them with --force"
        )
    edits = [f"+{word}" for word in now if word not in written]
    edits += [f"-{word}" for word in written if word not in now]
    if list(now) != written:
        raise SettingsError(
            f"--out: {path}: cues.words was edited by hand ({', '.join(edits) or 'order'}); name "
            "another file, or overwrite it with --force"
        )
    if policy.cues.match != found.match:
        raise SettingsError(
            f"--out: {path}: cues.match is {policy.cues.match}, and the new cues are for "
            f"{found.match}; name another file, or overwrite it with --force"
        )


# ---- one value of a YAML ------------------------------------------------------------------------


def _set(text: str, keys: Sequence[str], value: Any) -> str:
    """The YAML with one value set; every character outside of it stays."""
    mapping = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in keys[:-1]:
        mapping = _entries(mapping)[key][1]
    assert isinstance(mapping, yaml.MappingNode)
    entry = _entries(mapping).get(keys[-1])
    if entry is None:
        return _added(text, mapping, keys[-1], value)
    key_node, old = entry
    start, end = old.start_mark.index, _end(old)
    if key_node.start_mark.line != old.start_mark.line:  # a block of its own
        column = old.start_mark.column
        return text[:start] + _indented(_block(value), column) + text[end:]
    start = text.index(":", key_node.end_mark.index) + 1
    flow = mapping.flow_style or not isinstance(value, dict)
    new = f" {_inline(value)}" if flow else _below(value, key_node.start_mark.column)
    return text[:start] + new + text[end:]


def _entries(mapping: yaml.Node | None) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    assert isinstance(mapping, yaml.MappingNode)
    return {key.value: (key, value) for key, value in mapping.value}


def _end(node: yaml.Node) -> int:
    """Where it ends; a block's own mark is after the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _added(text: str, mapping: yaml.MappingNode, key: str, value: Any) -> str:
    start = mapping.value[0][0].start_mark
    if mapping.flow_style:
        return f"{text[: start.index]}{key}: {_inline(value)}, {text[start.index :]}"
    if start.column:
        new = f"{key}: {_inline(value)}\n{' ' * start.column}"
        return text[: start.index] + new + text[start.index :]
    return f"{text.rstrip()}\n{key}:{_below(value, 0)}\n"


def _inline(value: Any) -> str:
    return _dump(value, flow=True, width=float("inf"))


def _below(mapping: dict[str, Any], column: int) -> str:
    """What follows the colon of a key in that column."""
    if not mapping:
        return " {}"
    return "\n" + indent(_block(mapping), " " * (column + 2))


def _indented(block: str, column: int) -> str:
    """All but the first line."""
    return indent(block, " " * column).removeprefix(" " * column)


def _block(value: Any) -> str:
    """Each entry on its line, the innermost collections inline."""
    if isinstance(value, dict):
        return "\n".join(
            _dump({key: one}, flow=None if isinstance(one, dict | list) else False)
            for key, one in value.items()
        )
    return _dump(value, flow=False)


def _dump(value: Any, *, flow: bool | None, width: float = 90) -> str:
    dumped = yaml.safe_dump(
        value, default_flow_style=flow, allow_unicode=True, sort_keys=False, width=width
    )
    return str(dumped).removesuffix("...\n").rstrip()

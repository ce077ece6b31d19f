"""Logprobs of chat completions: which belong to a text, and in the form of the SDKs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Entry = dict[str, Any]
"""A token with its logprob, as chat completions tell it."""


def entries_of(text: str, entries: list[Entry]) -> list[Entry]:
    """The entries whose tokens make up `text`, where others (of the thinking, say) stand beside."""
    lengths = [len(_bytes(entry)) for entry in entries]
    wanted = text.encode()
    start = b"".join(map(_bytes, entries)).rfind(wanted)
    if start < 0:
        return entries
    chosen, at = [], 0
    for entry, length in zip(entries, lengths, strict=True):
        if at < start + len(wanted) and at + length > start:
            chosen.append(entry)
        at += length
    return chosen


def entry_of(entry: Mapping[str, Any]) -> Entry:
    """An entry with all that the SDKs need: engines leave out bytes and alternatives."""
    top = [{**other, "bytes": list(_bytes(other))} for other in entry.get("top_logprobs") or ()]
    return {**entry, "bytes": list(_bytes(entry)), "top_logprobs": top}


def _bytes(entry: Mapping[str, Any]) -> bytes:
    given = entry.get("bytes")
    return str(entry.get("token") or "").encode() if given is None else bytes(given)

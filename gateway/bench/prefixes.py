"""What a simulated engine still knows of earlier prompts: whole blocks of tokens, as in vLLM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16
"""Tokens; vLLM's default."""
BLOCKS = 1 << 17
"""Two million tokens: about what an 80 GB card holds of a small model's cache."""


class PrefixCache:
    """The least recently used blocks are forgotten first."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self._most = blocks
        self._known: OrderedDict[int, None] = OrderedDict()

    def add(self, ids: Sequence[int]) -> int:
        """Takes the prompt in; how many tokens of its beginning were known already."""
        cached, together = 0, True
        for block in _blocks(ids):
            together = together and block in self._known
            cached += BLOCK * together
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return cached


def _blocks(ids: Sequence[int]) -> Iterator[int]:
    """A number for each whole block that depends on all that comes before it too."""
    before = 0
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        before = hash((before, *ids[start : start + BLOCK]))
        yield before

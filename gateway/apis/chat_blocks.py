"""A chat completion cut into blocks: thinking, text and tool calls, one open at a time. Pure.

Messages and Responses tell a reply as a row of blocks, each opened, filled and closed before the
next. Chat completions tell it as deltas, and an engine may mix the deltas of parallel tool calls.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import orjson

from gateway import sse
from gateway.apis.chat_logprobs import Entry, entries_of
from gateway.errors import UpstreamError


class BlockKind(enum.Enum):
    THINKING = "thinking"
    TEXT = "text"
    TOOL = "tool"


@dataclass(slots=True)
class Block:
    """`text` is a tool's arguments where it is one. `waiting` came while another block was open."""

    kind: BlockKind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    waiting: list[tuple[str, list[Entry]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def whole(self) -> bool:
        """Whether nothing more is due once another block has begun."""
        if self.kind is not BlockKind.TOOL:
            return True
        if not self.pieces or not self.pieces[-1].rstrip().endswith("}"):
            return False
        try:
            orjson.loads(self.text)
        except orjson.JSONDecodeError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Opened:
    block: Block


@dataclass(frozen=True, slots=True)
class Added:
    block: Block
    text: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True)
class Closed:
    block: Block


Step = Opened | Added | Closed


class ChatBlocks:
    """Feed chunks as they come; get the steps that they make.

    `finish` is the `finish_reason` and None until it came, `stop_text` the stop string that was
    met where the engine tells it, `usage` the last one told.
    """

    __slots__ = (
        "_by_id",
        "_by_index",
        "_carried",
        "_last",
        "_opened",
        "_position",
        "blocks",
        "created",
        "finish",
        "id",
        "stop_text",
        "usage",
    )

    def __init__(self) -> None:
        self.id = ""
        self.created = 0
        self.blocks: list[Block] = []
        self.finish: str | None = None
        self.stop_text: str | None = None
        self.usage: dict[str, Any] | None = None
        self._position = 0  # of the first block that is not closed
        self._opened = False  # whether that one is
        self._by_id: dict[str, Block] = {}
        self._by_index: dict[int, Block] = {}
        self._last: Block | None = None  # of the tool calls
        self._carried: list[Entry] = []  # of tokens whose text has not come yet

    def feed(self, chunk: Mapping[str, Any]) -> list[Step]:
        """A chunk, or a whole completion. UpstreamError: it can't be put in order."""
        self.id = self.id or str(chunk.get("id") or uuid4().hex).removeprefix("chatcmpl-")
        self.created = self.created or int(chunk.get("created") or 0)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            self._take(choice.get("delta") or choice.get("message") or {}, choice)
            if reason := choice.get("finish_reason"):
                self.finish = reason
                stop = choice.get("stop_reason") or choice.get("matched_stop")  # vLLM, SGLang
                self.stop_text = stop if isinstance(stop, str) else None
        return self._steps()

    @property
    def used_tools(self) -> bool:
        return self._last is not None

    def _take(self, delta: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        thought = _text(delta, "reasoning_content") or _text(delta, "reasoning")
        content = _text(delta, "content") or _text(delta, "refusal")
        calls = delta.get("tool_calls") or ()
        entries = self._carried + ((choice.get("logprobs") or {}).get("content") or [])
        self._carried = [] if content or thought or calls else entries
        if thought:
            self._write(BlockKind.THINKING, thought, [])
        if content:
            self._write(BlockKind.TEXT, content, entries_of(content, entries))
        for call in calls:
            self._call(call)

    def _write(self, kind: BlockKind, text: str, entries: list[Entry]) -> None:
        last = self.blocks[-1] if len(self.blocks) > self._position else None
        block = last if last is not None and last.kind is kind else self._begin(kind)
        block.waiting.append((text, entries))

    def _begin(self, kind: BlockKind) -> Block:
        block = Block(kind, len(self.blocks))
        self.blocks.append(block)
        return block

    def _call(self, call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        name, arguments = _text(function, "name"), _text(function, "arguments")
        block = self._tool(call.get("id"), call.get("index"), name)
        block.name = block.name or name
        if not arguments:
            return
        if block.index >= self._position:
            block.waiting.append((arguments, []))
        elif arguments.strip():
            raise UpstreamError(
                f"The engine went on with the call of {block.name!r} after its end",
                code="generation_failed",
            )

    def _tool(self, call_id: str | None, index: int | None, name: str) -> Block:
        """The block of a tool call's delta, by id, then by index, then by order.

        A new id with a name is a new call even at an index that was seen: some engines leave all
        at 0. A new id without a name is not: some make up another id for each delta.
        """
        block = self._by_id.get(call_id or "")
        if block is None:
            known = self._last if index is None else self._by_index.get(index)
            if known is None and not (call_id or name):
                known = self._last
            fresh = bool(call_id and name) or (index is None and bool(call_id or name))
            block = self._begin(BlockKind.TOOL) if known is None or fresh else known
        block.id = block.id or call_id or ""
        self._last = block
        if call_id:
            self._by_id[call_id] = block
        if index is not None:
            self._by_index[index] = block
        return block

    def _steps(self) -> list[Step]:
        """Opens, fills and closes the blocks in their order, as far as it is known that it may."""
        steps: list[Step] = []
        while self._position < len(self.blocks):
            block = self.blocks[self._position]
            if not self._opened:
                if block.kind is BlockKind.TOOL and not block.name and not self.finish:
                    break
                block.id = block.id or f"call_{self.id}_{block.index}"
                self._opened = True
                steps.append(Opened(block))
            steps += self._fill(block)
            followed = self._position + 1 < len(self.blocks)
            if not self.finish and not (followed and block.whole):
                break
            steps.append(Closed(block))
            self._position += 1
            self._opened = False
        return steps

    def _fill(self, block: Block) -> list[Step]:
        waiting, block.waiting = block.waiting, []
        for text, entries in waiting:
            block.pieces.append(text)
            block.entries += entries
        return [Added(block, text, entries) for text, entries in waiting]


def cut_short(finish: str | None) -> UpstreamError:
    """The error of a reply that has no ending which its client's API knows."""
    ended = "without a finish_reason" if finish is None else f"with the finish_reason {finish!r}"
    return UpstreamError(f"The engine ended its reply {ended}", code="engine_truncated")


def count(usage: Mapping[str, Any], details: str, key: str) -> int | None:
    """A count of tokens from one of the details of `usage`, None where it is not told."""
    return (usage.get(details) or {}).get(key)


def wire(event: Mapping[str, Any]) -> bytes:
    """An event named by its type, which is how both formats name theirs."""
    name: str = event["type"]
    return b"event: " + name.encode() + b"\n" + sse.event(orjson.dumps(event))


def _text(delta: Mapping[str, Any], key: str) -> str:
    value = delta.get(key)
    return value if isinstance(value, str) else ""

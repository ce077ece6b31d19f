"""What all fake engines share: they decode by script, whatever their dialect."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

from tests.gateway.fakes import templates
from tests.gateway.fakes.decode import Decode, Refused, Reply, Sink, Stream, Token, Whole, wait
from tests.gateway.fakes.http import Connection, FakeServer, Request
from tests.gateway.fakes.script import Act, Gate, Script, writes
from tests.gateway.fakes.tokens import Tokenizer

__all__ = ["CHAT", "COMPLETIONS", "FakeEngine", "Refused", "Reply", "Token"]

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_OK = writes("ok")


class FakeEngine(FakeServer):
    """Decodes by script. Public attributes may be changed at any time."""

    data_field = b"data: "

    def __init__(
        self,
        script: Script = _OK,
        *,
        model: str = "model",
        tokenizer: Tokenizer | None = None,
        context: int = 4096,
        system: str = "",
        opens: str = "",
    ) -> None:
        super().__init__()
        self.script = script
        self.model = model
        self.tokenizer = tokenizer or Tokenizer()
        self.context = context
        self.system = system
        """What this model's template writes first."""
        self.opens = opens
        """What it writes after the assistant's header."""
        self.template: templates.Kind = "verbatim"
        """What it does to the assistant's thoughts."""
        self.think_tags: tuple[str, str] | None = None
        """The tags that the server found in it, if it looks for them."""
        self.chats = False
        """Whether chats, and completions that do not stream, are really served."""
        self.asides: dict[str, Script] = {}
        """By a part of the request: another script; `decodes` and `prompts` leave these out."""
        self.refusals: dict[str, tuple[int, bytes]] = {}
        """By path: an HTTP error instead of an answer."""
        self.gates: dict[str, Gate] = {}
        """By path: answers wait for it."""
        self.whole_reply = b'{"id": "whole",  "choices": []}'
        self.dies_on_reuse: Literal["close", "reset", None] = None
        self.dies_always = False
        self.cached: int | None = None
        """Prompt tokens that a usage tells to have been cached."""
        self.tokens_per_chunk = 1
        self.line_end = b"\n"
        self.comments = False
        self.in_one_write = False

    # ---- what the tests ask ---------------------------------------------------------------------

    @property
    def decodes(self) -> list[Request]:
        decodes = [request for request in self.requests if self.is_decode(request.path)]
        return [request for request in decodes if self._aside(request) is None]

    def _aside(self, request: Request) -> Script | None:
        text = request.content.decode(errors="replace")
        return next((script for part, script in self.asides.items() if part in text), None)

    async def decode(self, number: int = 0, seconds: float = 5.0) -> Request:
        return await self.arrival(lambda: self.decodes, number, seconds)

    def prompts(self) -> list[str]:
        """The texts that the model was to go on with; requests refused for their form have none."""
        texts = []
        for request in self.decodes:
            try:
                texts.append(self.tokenizer.decode(self.prompt_of(request)))
            except Refused:
                continue
        return texts

    def text_of(self, prompt: Any) -> str:
        return self.tokenizer.decode(self.ids_of(prompt))

    def ids_of(self, prompt: Any) -> list[int]:
        """What a prompt of ids or text is to this engine, but for a begin token."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def rendered(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """The chat template. Raises: Refused."""
        try:
            text = templates.applied(messages, self.template, self.opens, options)
        except ValueError as error:
            raise self.refusal(str(error)) from error
        return self.system + text

    # ---- the dialect ----------------------------------------------------------------------------

    def is_decode(self, path: str) -> bool:
        return path == COMPLETIONS or (path == CHAT and self.chats)

    @abstractmethod
    def listing(self) -> dict[str, Any]: ...

    @abstractmethod
    async def other(self, request: Request, connection: Connection) -> None:
        """Answers on all paths but those that decode, and the list of models."""

    @abstractmethod
    def prompt_of(self, request: Request) -> list[int]:
        """What the model is to go on with. Raises: Refused."""

    @abstractmethod
    def reply(self, request: Request) -> Reply:
        """Raises: Refused."""

    def refusal(self, message: str, status: int = 400, kind: str = "BadRequestError") -> Refused:
        body = {"message": message, "type": kind, "param": None, "code": status}
        return Refused({"error": body}, status)

    def refuse(self, refused: Refused, request: Request, connection: Connection) -> None:
        connection.json(refused.body, refused.status)

    def comment(self, end: bytes) -> bytes:
        return b": keep-alive" + end + b":" + end + end

    # ---- HTTP -----------------------------------------------------------------------------------

    async def refuses(self, connection: Connection) -> bool:
        if self.dies_always:
            connection.close()
            return True
        if self.dies_on_reuse is None or connection.requests < 2:
            return False
        if self.dies_on_reuse == "reset":
            connection.reset()
        else:
            connection.close()
        return True

    async def answer(self, request: Request, connection: Connection) -> None:
        if gate := self.gates.get(request.path):
            await wait(gate)
        if refusal := self.refusals.get(request.path):
            status, body = refusal
            connection.whole(body, status)
            return
        try:
            await self._answer(request, connection)
        except Refused as refused:
            self.refuse(refused, request, connection)

    async def _answer(self, request: Request, connection: Connection) -> None:
        if request.path == "/v1/models":
            connection.json({"object": "list", "data": [self.listing()]})
        elif self.takes_whole(request):
            connection.whole(self.whole_reply, **{"x-engine": "fake"})
        elif self.is_decode(request.path):
            await self._decode(request, connection)
        else:
            await self.other(request, connection)

    def takes_whole(self, request: Request) -> bool:
        """What the gateway passed through, where chats are not served."""
        if self.chats:
            return False
        return request.path == CHAT or (
            request.path == COMPLETIONS and not request.body.get("stream")
        )

    async def _decode(self, request: Request, connection: Connection) -> None:
        reply = self.reply(request)
        try:
            script = self._aside(request) or self.script
            acts = list(script(self.tokenizer.decode(reply.prompt)))
        except AssertionError as error:
            connection.json({"error": {"message": str(error), "code": 500}}, 500)
            return
        sink: Sink = Whole(connection, reply)
        if self.streams(request):
            sink = Stream(self, connection, reply)
        await self.run(reply, acts, sink)

    def streams(self, request: Request) -> bool:
        return bool(request.body.get("stream"))

    async def run(self, reply: Reply, acts: list[Act], sink: Sink) -> None:
        await Decode(reply, sink, self.tokenizer, self.tokens_per_chunk).run(acts)

"""What the demo shows: progress, a reply in the colours of its writers, hints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from gateway.demo.ask import Fragment, Reply, Target, ask
from gateway.demo.compare import OnReply
from gateway.demo.problems import Problem
from gateway.demo.report import STYLES
from gateway.demo.result import Mode

_PLAIN_EVERY = 0.25  # of the comparison, where no bar can be drawn


class Screen:
    """The demo's console, with or without colours and a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._coloured = console.is_terminal and not console.no_color

    def say(self, line: str) -> None:
        """One line as it is: no wrapping, so that it can be copied."""
        self.console.print(line, markup=False, soft_wrap=True)

    def show(self, drawn: RenderableType) -> None:
        self.console.print(drawn)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """A spinner while the block runs; a plain line where there is no terminal."""
        if not self.console.is_terminal:
            self.say(what)
            yield
            return
        with self.console.status(what):
            yield

    # ---- a first look ---------------------------------------------------------------------------

    async def first_look(self, target: Target, question: str) -> Reply:
        """Streams one relayed reply, each model's text in its own colour."""
        self.console.print(self._legend())
        self.say(f"> {question}")
        writer = _Writer(self.console, self._coloured)
        async with target.client() as client:
            reply = await ask(
                client, target, question, on_text=writer.write, relaygen={"trace": True}
            )
        self.console.print()
        self.say(_counts(reply))
        return reply

    def _legend(self) -> Text:
        legend = Text("\nA first look. ")
        if not self._coloured:
            return legend + Text("[large] and [small] mark who writes; `---` begins the answer.")
        for role in (Mode.LARGE, Mode.SMALL):
            legend.append(f"{role} model", STYLES[role])
            legend.append(", ")
        return legend.append("reasoning in italics", "dim italic")

    # ---- the comparison -------------------------------------------------------------------------

    @contextmanager
    def comparing(self, count: int) -> Iterator[OnReply]:
        """A bar with the time left, over the replies of `count` problems in every mode."""
        total = count * len(Mode)
        if not self.console.is_terminal:
            self.say(f"comparing large, small and relay on {count} problems")
            yield _PlainProgress(self, total).on_reply
            return
        bar = Progress(
            TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=self.console, transient=True,
        )  # fmt: skip
        with bar:
            task = bar.add_task("", total=total)

            def on_reply(_mode: Mode, _problem: Problem, _right: bool) -> None:
                bar.advance(task)

            yield on_reply

    def hint(self, url: str, model: str) -> None:
        """How to call the gateway that stays up."""
        self.say(
            f"""
The gateway stays up at {url}/v1 (Ctrl-C ends it). Try:

  curl {url}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "What is 47*6 + 82*5?"}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="unused")
  messages = [{{"role": "user", "content": "What is 47*6 + 82*5?"}}]
  print(client.chat.completions.create(model="{model}", messages=messages).choices[0].message)
"""
        )


class _Writer:
    """Prints fragments as they come."""

    def __init__(self, console: Console, coloured: bool) -> None:
        self._console = console
        self._coloured = coloured
        self._last: Fragment | None = None

    def write(self, fragment: Fragment) -> None:
        last, self._last = self._last, fragment
        text = fragment.text if last else fragment.text.lstrip()
        if last and last.reasoning and not fragment.reasoning:
            self._print("\n" if self._coloured else "\n---\n", "")
            text = text.lstrip()
        if not self._coloured and fragment.role and (not last or last.role != fragment.role):
            self._print(f"[{fragment.role}] ", "")
        self._print(text, _style(fragment) if self._coloured else "")

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, end="", markup=False, soft_wrap=True)


class _PlainProgress:
    """A line every quarter of the way."""

    def __init__(self, screen: Screen, total: int) -> None:
        self._screen, self._total = screen, total
        self._done = 0
        self._next = _PLAIN_EVERY

    def on_reply(self, _mode: Mode, _problem: Problem, _right: bool) -> None:
        self._done += 1
        if self._done >= self._next * self._total:
            self._next += _PLAIN_EVERY
            self._screen.say(f"  {self._done} of {self._total} replies")


def _style(fragment: Fragment) -> str:
    colour = STYLES[Mode(fragment.role)] if fragment.role else ""
    return f"dim italic {colour}".strip() if fragment.reasoning else colour


def _counts(reply: Reply) -> str:
    if reply.relay is None:
        return f"({reply.tokens} tokens)"
    usage = reply.relay
    return (
        f"({usage.large_tokens} tokens by the large model, {usage.small_tokens} by the small one, "
        f"{usage.handoffs} handoffs, {reply.wall_s:.2f} s)"
    )

"""The comparison as a terminal table, as Markdown, and in one sentence."""

from __future__ import annotations

from rich.table import Table

from gateway.demo.result import Comparison, Mode, ModeResult

COLUMNS = (
    "", "right", "large tokens", "small tokens", "small share", "handoffs", "wall s", "ms a token",
    "first token ms",
)  # fmt: skip
STYLES = {Mode.LARGE: "cyan", Mode.SMALL: "yellow", Mode.RELAY: "bold"}
_NAMES = {Mode.LARGE: "large alone", Mode.SMALL: "small alone", Mode.RELAY: "relay"}


def table(found: Comparison) -> Table:
    """The comparison for a terminal."""
    title = f"{found.relay.problems} problems (seed {found.seed}), one at a time"
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        header = column.replace(" ", "\n")
        drawn.add_column(header, justify="right" if column else "left", no_wrap=True)
    for result in found.modes:
        drawn.add_row(*_cells(result), style=STYLES[result.mode])
    return drawn


def markdown(found: Comparison) -> str:
    """The comparison as a Markdown table and the sentences below it."""
    rows: list[tuple[str, ...]] = [COLUMNS, ("---", *["---:"] * (len(COLUMNS) - 1))]
    rows += [_cells(result) for result in found.modes]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *summary(found)])


def summary(found: Comparison) -> list[str]:
    """What the table means, a sentence a line."""
    relay, points = found.relay, 100 * (found.relay.accuracy - found.large.accuracy)
    lines = [
        f"The small model wrote {relay.small_share:.0%} of the relay's tokens, at {points:+.1f} "
        "points of accuracy against the large model alone.",
        f"Relay wall time: {found.relay_to_large:.2f} of the large model's alone, "
        f"{found.relay_to_ideal:.2f} of the ideal {found.ideal_s:.2f} s "
        "(every token at its own model's speed, handoffs free).",
    ]
    if relay.handoff_ms_p50 is not None:
        lines.append(
            f"From a handoff to the next model's first token: {relay.handoff_ms_p50:.1f} ms "
            f"(median); {relay.handoffs / relay.problems:.1f} handoffs a reply."
        )
    return lines


def _cells(result: ModeResult) -> tuple[str, ...]:
    return (
        _NAMES[result.mode],
        f"{result.right}/{result.problems}",
        str(result.large_tokens),
        str(result.small_tokens),
        f"{result.small_share:.0%}",
        str(result.handoffs),
        f"{result.wall_s:.2f}",
        f"{result.ms_per_token:.2f}",
        f"{1000 * result.first_token_s:.1f}",
    )

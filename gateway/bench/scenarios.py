"""What is measured: each scenario brings rows of a table, from runs side by side."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gateway.bench.script import ANSWER
from gateway.bench.stage import Stage, staged

Run = Callable[..., Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Row:
    """One number. `direct` is the engine's own without the gateway; `budget` bounds `value`."""

    scenario: str
    what: str
    value: float
    unit: str
    direct: float | None = None
    budget: str = ""

    @property
    def ratio(self) -> float | None:
        return self.value / self.direct if self.direct else None

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    rounds: int
    scale: float

    def of(self, count: int) -> int:
        return max(1, int(count * self.scale))


async def first_token(size: Size) -> list[Row]:
    """Time to the first token at one stream."""
    found: dict[str, list[float]] = {"direct": [], "passthrough": [], "relay": []}
    async with staged(tokens=4) as stage:
        for _ in range(size.rounds + 1):
            for name, run in _ways(stage):
                told = _sound(await run(requests=size.of(100)))
                found[name].append(median(told["first_ms"]))
    direct, passed, relayed = (median(values[1:]) for values in found.values())
    return [
        Row("first_token", "passed through, added", passed - direct, "ms", None, "<= 1.0"),
        Row("first_token", "relayed, added", relayed - direct, "ms", None, "<= 1.0"),
        Row("first_token", "passed through", passed, "ms", direct),
        Row("first_token", "relayed", relayed, "ms", direct),
    ]


async def throughput(size: Size) -> list[Row]:
    """Tokens a second of 32 streams whose engines take no time."""
    tokens, streams, requests = 2000, 32, size.of(4)
    count = streams * requests * (tokens + ANSWER + 2)
    rates: dict[str, list[float]] = {"direct": [], "passthrough": [], "relay": []}
    cpu: list[float] = []
    async with staged(tokens=tokens) as stage:
        for _ in range(size.rounds):
            for name, run in _ways(stage):
                before = stage.cpu_s()
                told = _sound(await run(streams=streams, requests=requests))
                rates[name].append(count / told["seconds"])
                if name == "relay":
                    cpu.append((stage.cpu_s() - before) / count * 1e6)
    direct = median(rates["direct"])
    return [
        Row("throughput", "direct", direct, "tokens/s"),
        Row("throughput", "passed through", median(rates["passthrough"]), "tokens/s", direct,
            ">= 60,000"),
        Row("throughput", "relayed", median(rates["relay"]), "tokens/s", direct, ">= 40,000"),
        Row("throughput", "relayed, the gateway's CPU", median(cpu), "us/token"),
    ]  # fmt: skip


async def handoffs(size: Size) -> list[Row]:
    """From the writing of a segment's last token to the next decode's request, at the engines."""
    rows = []
    for streams in (1, 64):
        async with staged(tokens=400, large_run=20, small_run=20, token_ms="5,5") as stage:
            await stage.relay()
            await stage.engines()
            _sound(await stage.relay(streams=streams, requests=1 if streams > 1 else size.of(4)))
            told = sorted((await stage.engines())["handoff_ms"])
        at = f"{streams} stream{'s' if streams > 1 else ''}"
        half, most = told[len(told) // 2], told[len(told) * 99 // 100]
        rows.append(Row("handoffs", f"{at}, median", half, "ms", None, "<= 0.5"))
        budget = "<= 2.0" if streams > 1 else ""
        rows.append(Row("handoffs", f"{at}, p99", most, "ms", None, budget))
    return rows


async def efficiency(size: Size) -> list[Row]:
    """Engines as fast as Qwen3-32B and 1.7B on H100s: the wall time against the ideal."""
    large_ms, small_ms, large_first, small_first, large, small = 25.0, 4.0, 30.0, 10.0, 30, 20
    pieces = size.of(8)
    tokens = pieces * (large + small)
    options = {
        "tokens": tokens,
        "token_ms": f"{large_ms},{small_ms}",
        "first_ms": f"{large_first},{small_first}",
    }
    relayed, alone = [], []
    async with staged(**options, large_run=large, small_run=small) as stage:
        for _ in range(2):
            alone += _sound(await stage.relay(streams=4, mode="large"))["total_ms"]
            relayed += _sound(await stage.relay(streams=4))["total_ms"]
    # The last small segment is the answer's, after </think>, which the large model writes.
    by_large, by_small = pieces * large + 2, pieces * small + ANSWER
    decodes = pieces + 1  # of each model; the first token of each takes the first-token time
    ideal = (by_large - decodes) * large_ms + (by_small - decodes) * small_ms
    ideal += decodes * (large_first + small_first)
    amdahl = (large_first + (by_large + by_small - 1) * large_ms) / ideal
    wall = median(relayed)
    return [
        Row("efficiency", "ideal / relayed", ideal / wall, "", None, ">= 0.95"),
        Row("efficiency", "large alone / relayed", median(alone) / wall, "x"),
        Row("efficiency", "the same by Amdahl", amdahl, "x"),
        Row("efficiency", "measured / Amdahl", median(alone) / wall / amdahl, "", None, ">= 0.97"),
    ]


async def growth(size: Size) -> list[Row]:
    """The gateway's CPU for a token, in short generations and in long ones."""
    rows: list[Row] = []
    short: dict[int, float] = {}
    for tokens in (1_000, 8_000, 32_000):
        for run in (0, 64):
            async with staged(
                tokens=tokens, large_run=run, small_run=run, token_ms="0.5,0.5"
            ) as stage:
                before = stage.cpu_s()
                _sound(await stage.relay(requests=max(1, size.of(8_000) // tokens)))
                used = stage.cpu_s() - before
            count = max(1, size.of(8_000) // tokens) * (tokens + ANSWER + 2)
            each = used / count * 1e6
            what = f"{tokens:,} tokens, {'a handoff every 64' if run else 'no handoffs'}"
            base = short.setdefault(run, each)
            budget = "<= 1.10 x" if tokens > 1000 else ""
            rows.append(Row("growth", what, each, "us/token", base, budget))
    return rows


async def streams(size: Size) -> list[Row]:
    """Many streams of 25 ms a token: gaps between what a client gets, and memory."""
    rows = []
    for count in (1, 32, 256, 2_000):
        tokens = size.of(400)
        async with staged(tokens=tokens, token_ms="25,25") as stage:
            await stage.relay()
            empty = stage.rss_kib()
            direct = await stage.direct(streams=count)
            told = _sound(await stage.relay(streams=count))
            grown = (stage.rss_kib() - empty) / count
        at = f"{count:,} stream{'s' if count > 1 else ''}"
        many = count == 2_000
        rows += [
            Row("streams", f"{at}, gap median", told["gap_ms"]["50"], "ms", direct["gap_ms"]["50"]),
            Row("streams", f"{at}, gap p99", told["gap_ms"]["99"], "ms", direct["gap_ms"]["99"],
                "<= 60" if many else ""),
        ]  # fmt: skip
        if count >= 256:
            rows.append(Row("streams", f"{at}, memory each", grown, "KiB", None, "<= 100"))
    return rows


SCENARIOS: dict[str, Callable[[Size], Awaitable[list[Row]]]] = {
    "first_token": first_token,
    "throughput": throughput,
    "handoffs": handoffs,
    "efficiency": efficiency,
    "growth": growth,
    "streams": streams,
}


def _ways(stage: Stage) -> list[tuple[str, Run]]:
    return [
        ("direct", stage.direct),
        ("passthrough", stage.passthrough),
        ("relay", stage.relay),
    ]


def _sound(told: dict[str, Any]) -> dict[str, Any]:
    """Raises RuntimeError where a stream had an error, or no end."""
    if told["errors"]:
        raise RuntimeError(f"{told['errors']} streams broke")
    return told

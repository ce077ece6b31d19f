"""What is measured: each scenario brings rows of a table, from runs side by side."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from gateway.bench.script import ANSWER
from gateway.bench.stage import Stage, staged

Run = Callable[..., Awaitable[dict[str, Any]]]

_AHEAD = {
    "to the large model": "ms",
    "to the small model": "ms",
    "a generation": "ms",
    "prefilled": "tokens",
    "decoded": "tokens",
    "decodes": "",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One number. `direct` is the engine's own without the gateway, or another base.

    `budget` bounds `value`.
    """

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

    @property
    def quick(self) -> bool:
        return self.scale < 1

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
    merged = 0.0
    async with staged(tokens=tokens) as stage:
        for _ in range(size.rounds):
            for name, run in _ways(stage):
                before = stage.cpu_s()
                told = _sound(await run(streams=streams, requests=requests), count)
                rates[name].append(count / told["seconds"])
                if name == "relay":
                    merged = count / told["frames"]
                    cpu.append((stage.cpu_s() - before) / count * 1e6)
    direct = median(rates["direct"])
    return [
        Row("throughput", "direct", direct, "tokens/s"),
        Row("throughput", "passed through", median(rates["passthrough"]), "tokens/s", direct,
            ">= 60,000"),
        Row("throughput", "relayed", median(rates["relay"]), "tokens/s", direct, ">= 40,000"),
        Row("throughput", "relayed, the gateway's CPU", median(cpu), "us/token"),
        Row("throughput", "relayed, of one read", merged, "tokens/chunk"),
    ]  # fmt: skip


async def switching(size: Size) -> list[Row]:
    """Tokens a second, and CPU, of 32 streams of 1 ms a token, by how often they change hands.

    A token takes its time here: engines that take none run far ahead of every handoff.
    """
    tokens, streams = size.of(2000), 32
    count = streams * (tokens + ANSWER + 2)
    rows: list[Row] = []
    cpu: dict[int, float] = {}
    for run in (0, 100, 20):
        async with staged(tokens=tokens, large_run=run, small_run=run, token_ms="1,1") as stage:
            await stage.relay()
            direct = _sound(await stage.direct(streams=streams))
            before = stage.cpu_s()
            told = _sound(await stage.relay(streams=streams), count)
            cpu[run] = (stage.cpu_s() - before) / count * 1e6
        rate, base = count / told["seconds"], count / direct["seconds"]
        what = f"a handoff every {run}" if run else "no handoffs"
        rows.append(Row("switching", what, rate, "tokens/s", base))
        rows.append(Row("switching", f"{what}, the gateway's CPU", cpu[run], "us/token"))
        merged = count / told["frames"]
        rows.append(Row("switching", f"{what}, of one read", merged, "tokens/chunk"))
    rows.append(Row("switching", "a handoff's own CPU", (cpu[20] - cpu[0]) * 20, "us"))
    return rows


async def handoffs(size: Size) -> list[Row]:
    """From the writing of a segment's last token to the next decode's request, at the engines."""
    rows = []
    for streams in (1, 64):
        # Streams begin one after the other within a segment of each model: they are not in step.
        async with staged(
            tokens=size.of(400), large_run=20, small_run=20, token_ms="25,4"
        ) as stage:
            await stage.relay()
            await stage.engines()
            _sound(await stage.relay(streams=streams, spread=20 * 29 / 1e3))
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
    options: dict[str, Any] = {
        "tokens": tokens,
        "token_ms": f"{large_ms},{small_ms}",
        "first_ms": f"{large_first},{small_first}",
    }
    relayed, alone = [], []
    async with staged(**options, large_run=large, small_run=small) as stage:
        await stage.relay()
        for _ in range(2):
            alone += _sound(await stage.relay(streams=4, mode="large"))["total_ms"]
            relayed += _sound(await stage.relay(streams=4))["total_ms"]
    # The last small segment is the answer's, after </think>, which the large model writes. A
    # segment's first token comes after the first-token time, each other one a token time later.
    by_large, by_small = pieces * large + 2, pieces * small + ANSWER
    ideal = by_large * large_ms + by_small * small_ms
    ideal += (pieces + 1) * (large_first - large_ms + small_first - small_ms)
    amdahl = (large_first + (by_large + by_small - 1) * large_ms) / ideal
    wall = median(relayed)
    return [
        Row("efficiency", "ideal / relayed", ideal / wall, "", None, ">= 0.95"),
        Row("efficiency", "large alone / relayed", median(alone) / wall, "x"),
        Row("efficiency", "the same by Amdahl", amdahl, "x"),
        Row("efficiency", "measured / Amdahl", median(alone) / wall / amdahl, "", None, ">= 0.97"),
    ]


async def growth(size: Size) -> list[Row]:
    """The gateway's CPU for a token, in short generations and in long ones, at one stream."""
    rows: list[Row] = []
    short: dict[int, float] = {}
    for tokens in (1_000, 8_000, 32_000):
        for run in (0, 64):
            requests = max(1, size.of(32_000) // tokens)
            async with staged(
                tokens=tokens, large_run=run, small_run=run, token_ms="0.1,0.1"
            ) as stage:
                await stage.relay()
                before = stage.cpu_s()
                _sound(await stage.relay(requests=requests))
                used = stage.cpu_s() - before
            each = used / (requests * (tokens + ANSWER + 2)) * 1e6
            what = f"{tokens:,} tokens, {'a handoff every 64' if run else 'no handoffs'}"
            base = short.setdefault(run, each)
            budget = "<= 1.10 x" if tokens > 1000 else ""
            rows.append(Row("growth", what, each, "us/token", base, budget))
    return rows


async def streams(size: Size) -> list[Row]:
    """Many streams of 25 ms a token: gaps between what a client gets, and memory."""
    lengths = {1: 100, 32: 200, 256: 400, 2_000: 500}
    rows: list[Row] = []
    for count in (32, 256) if size.quick else lengths:
        rows += await _many(count, lengths[count])
    return rows


async def _many(count: int, tokens: int) -> list[Row]:
    load = {"streams": count, "spread": count * 0.005}  # all are open long before the first ends
    async with staged(tokens=tokens, token_ms="25,25") as stage:
        await stage.relay()
        empty = stage.rss_kib()
        direct = await stage.direct(**load)
        stage.forget_peak()
        told = _sound(await stage.relay(**load))
        grown = (stage.peak_kib() - empty) / count
    at = f"{count:,} stream{'s' if count > 1 else ''}"
    gap, alone = told["gap_ms"], direct["gap_ms"]
    last = "<= 60" if count == 2_000 else ""
    rows = [
        Row("streams", f"{at}, gap median", gap["50"], "ms", alone["50"]),
        Row("streams", f"{at}, gap p99", gap["99"], "ms", alone["99"], last),
        Row("streams", f"{at}, in all", told["seconds"], "s", direct["seconds"]),
    ]
    if count >= 256:
        rows.append(Row("streams", f"{at}, memory each", grown, "KiB", None, "<= 100"))
    return rows


async def workers(size: Size) -> list[Row]:
    """Tokens a second relayed by one process and by two; engines and load share the machine."""
    tokens, streams, requests = 2000, 32, size.of(4)
    count = streams * requests * (tokens + ANSWER + 2)
    rows: list[Row] = []
    for processes in (1, 2):
        async with staged(workers=processes, tokens=tokens) as stage:
            await stage.relay(streams=streams)
            before = stage.cpu_s()
            told = _sound(await stage.relay(streams=streams, requests=requests))
            cpu = (stage.cpu_s() - before) / count * 1e6
        what, rate = f"{processes} worker{'s' if processes > 1 else ''}", count / told["seconds"]
        base = rows[0].value if rows else None
        rows.append(Row("workers", what, rate, "tokens/s", base))
        rows.append(Row("workers", f"{what}, CPU of all", cpu, "us/token"))
    return rows


async def long_prompts(size: Size) -> list[Row]:
    """A prompt of 100,000 tokens: the first token, and what a handoff takes."""
    words, found = 100_000, dict[str, float]()
    async with staged(tokens=400, large_run=20, small_run=20, token_ms="1,1") as stage:
        for name, run in _ways(stage):
            await run(prompt=words, requests=size.of(8))  # engines know the prompts from here on
            await stage.engines()
            told = _sound(await run(prompt=words, requests=size.of(8)))
            found[name] = median(told["first_ms"])
        handed = median((await stage.engines())["handoff_ms"])
    direct = found["direct"]
    return [
        Row("long_prompts", "first token, passed through", found["passthrough"], "ms", direct),
        Row("long_prompts", "first token, relayed", found["relay"], "ms", direct),
        Row("long_prompts", "a handoff, median", handed, "ms"),
    ]


async def ahead(size: Size) -> list[Row]:
    """`overlap` and `warm_every_tokens`: off and on, what they save and what the engines do for it.

    Sentences end in numbers: one token more tells whether the large model goes on. Engines as fast
    as Qwen3-32B and 1.7B on H100s, then two that read as slowly as on a CPU.
    """
    rows: list[Row] = []
    for what, prefill, every in (("GPU", "200,50", 128), ("CPU", "2000,1000", 32)):
        options: dict[str, dict[str, object]] = {
            "overlap": {"overlap": True},
            "warming": {"warm_every_tokens": every},
        }
        engines: dict[str, Any] = {
            "tokens": size.of(720), "large_run": 160, "small_run": 20, "numbers": 1,
            "token_ms": "25,4", "first_ms": "30,10", "prefill_us": prefill,
        }  # fmt: skip
        plain = await _ahead(engines, {})
        for name, policy in options.items():
            told = await _ahead(engines, policy)
            label = f"{what}, {name}"
            for key, unit in _AHEAD.items():
                rows.append(Row("ahead", f"{label}, {key}", told[key], unit, plain[key]))
    return rows


async def _ahead(engines: dict[str, Any], policy: dict[str, object]) -> dict[str, float]:
    """Four streams; means of handoffs by the gateway's own metric, sums of what engines did."""
    async with staged(**engines, policy=policy) as stage:
        await stage.relay(max_tokens=8, prompt=8)  # of its own: engines know it from here on
        handoffs, before = await stage.handoffs(), await stage.engines()
        told = _sound(await stage.relay(streams=4, spread=1))
        later, after = await stage.handoffs(), await stage.engines()
    found: dict[str, float] = {}
    for role, (count, seconds) in later.items():
        began = handoffs.get(role, (0.0, 0.0))
        found[f"to the {role} model"] = (seconds - began[1]) / (count - began[0]) * 1e3
    found["a generation"] = median(told["total_ms"])
    names = {"prefilled": "prefilled", "decoded": "tokens", "decodes": "decodes"}
    return found | {name: after[key] - before[key] for name, key in names.items()}


SCENARIOS: dict[str, Callable[[Size], Awaitable[list[Row]]]] = {
    "first_token": first_token,
    "throughput": throughput,
    "switching": switching,
    "efficiency": efficiency,
    "handoffs": handoffs,
    "growth": growth,
    "streams": streams,
    "workers": workers,
    "long_prompts": long_prompts,
    "ahead": ahead,
}


def _ways(stage: Stage) -> list[tuple[str, Run]]:
    return [
        ("direct", stage.direct),
        ("passthrough", stage.passthrough),
        ("relay", stage.relay),
    ]


def _sound(told: dict[str, Any], tokens: int | None = None) -> dict[str, Any]:
    """Raises RuntimeError where a stream had an error, no end, or not so many `tokens` in all."""
    if told["errors"]:
        raise RuntimeError(f"{told['errors']} streams broke {told['refused']}")
    if tokens not in (None, told["tokens"]):
        raise RuntimeError(f"{told['tokens']} tokens came, and not {tokens}")
    return told

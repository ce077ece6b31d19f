"""/metrics: what is counted, in the form that Prometheus wants, over all workers."""

from __future__ import annotations

import asyncio
import re
import signal
import tempfile

import aiohttp
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families

from gateway import metrics
from gateway.cli import main
from gateway.errors import RequestError, UpstreamError
from gateway.extra import Extra
from gateway.observed import Observed
from gateway.spent import Spent
from relaygen.events import Handoff, Role
from relaygen.policy import Policy, load_policy
from relaygen.state import Trigger
from relaygen.usage import Usage
from tests.gateway.fakes import FakeVllm, Gate, Tokenizer, writes
from tests.gateway.fakes.script import silence, story
from tests.gateway.processes import START_S, free_port, relaygen, serve
from tests.gateway.support import (
    POLICY,
    STORY,
    WAIT_S,
    Served,
    Stage,
    ask,
    backends_of,
    get,
    leaving,
    policy_of,
    until_ready,
    within,
)


async def scrape(url: str, accept: str = "") -> tuple[str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/metrics", headers={"Accept": accept}) as response,
    ):
        assert response.status == 200
        return await response.text(), response.headers["Content-Type"]


Samples = dict[str, float]


async def samples(url: str) -> Samples:
    """Values by name and labels, as Prometheus writes them."""
    text, _ = await scrape(url)
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


class Counted:
    """What was added since the last look; other tests count in the same process."""

    def __init__(self, served: Served) -> None:
        self._url = served.url
        self._before: Samples = {}

    async def look(self) -> Samples:
        now = await samples(self._url)
        new = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        return {name: value for name, value in new.items() if value}


async def counted(served: Served) -> Counted:
    await until_ready(served, 200)
    found = Counted(served)
    await found.look()
    return found


def _tokens(found: Samples, role: str) -> float:
    """Of both phases."""
    labels = 'phase="{}",policy="pair",role="{}"'
    names = (labels.format(phase, role) for phase in ("reasoning", "answer"))
    return sum(found.get(f"relaygen_tokens_total{{{name}}}", 0) for name in names)


def _sum(found: Samples, beginning: str) -> float:
    return sum(value for name, value in found.items() if name.startswith(beginning))


# ---- what is counted ----------------------------------------------------------------------------


async def test_a_generation_is_counted_with_its_tokens(stage: Stage) -> None:
    same = Tokenizer()
    large, small = (FakeVllm(story(*STORY), model=m, tokenizer=same) for m in ("big", "tiny"))
    served = await stage.pair(large, small)
    count = await counted(served)
    usage = (await ask(served))["usage"]["relaygen"]
    found = await count.look()
    assert found['relaygen_generations_total{outcome="done",policy="pair"}'] == 1
    for role in ("large", "small"):
        assert _tokens(found, role) == usage[f"{role}_tokens"] > 0
    discarded = found.get('relaygen_discarded_tokens_total{policy="pair"}', 0)
    assert discarded == usage["discarded_tokens"]
    for role in ("large", "small"):
        labels = f'{{policy="pair",to="{role}"}}'
        assert found[f"relaygen_handoff_seconds_count{labels}"] > 0
        assert 0 < found[f"relaygen_handoff_seconds_sum{labels}"] < WAIT_S


async def test_what_a_generation_did_is_counted(stage: Stage) -> None:
    same = Tokenizer()
    large, small = (FakeVllm(story(*STORY), model=m, tokenizer=same) for m in ("big", "tiny"))
    served = await stage.pair(large, small)
    count = await counted(served)
    usage = (await ask(served))["usage"]["relaygen"]
    found = await count.look()
    both = usage["large_tokens"] + usage["small_tokens"]
    assert _sum(found, "relaygen_segment_tokens_sum") == both
    assert _sum(found, "relaygen_segment_tokens_count") == usage["segments"]
    assert _sum(found, "relaygen_handoffs_total") == usage["handoffs"]
    cues = [name for name in found if name.startswith("relaygen_handoffs_total") and "cue" in name]
    assert any('cue="Now"' in name and 'trigger="cue"' in name for name in cues)
    assert any('cue=""' in name and 'trigger="boundary"' in name for name in cues)
    for name in ("time_to_first_token_seconds", "generation_seconds", "large_share"):
        assert found[f'relaygen_{name}_count{{policy="pair"}}'] == 1
    share = found['relaygen_large_share_sum{policy="pair"}']
    assert share == pytest.approx(usage["large_utilization"], abs=1e-4)
    assert found['relaygen_phase_seconds_total{phase="prefill_large",policy="pair"}'] > 0
    sent = sum(len(decode.body["prompt"]) for decode in large.decodes)
    assert found['relaygen_sent_tokens_total{policy="pair",role="large"}'] == sent
    answered = 'relaygen_upstream_requests_total{backend="large",code="200",outcome="answered"}'
    assert found[answered] >= len(large.decodes)


async def test_tokens_that_came_together_share_their_time(stage: Stage) -> None:
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"))
    count = await counted(served)
    _all_counted()  # two tokens of the large model, 20 ms after the one before
    found = await count.look()
    labels = 'policy="pair",role="large"'
    assert found[f"relaygen_inter_token_seconds_sum{{{labels}}}"] == pytest.approx(0.02)
    for edge, tokens in ((0.005, 0), (0.01, 2), (1.0, 2)):
        bucket = f'relaygen_inter_token_seconds_bucket{{le="{edge}",{labels}}}'
        assert found.get(bucket, 0) == tokens


async def test_reasoning_and_answer_are_counted_apart(stage: Stage) -> None:
    large = FakeVllm(writes("<think>", "one", "two", "</think>"), model="big")
    small = FakeVllm(writes("the", "answer"), model="tiny")
    served = await stage.pair(large, small)
    count = await counted(served)
    usage = (await ask(served))["usage"]["relaygen"]
    found = await count.look()
    labels = 'policy="pair",role="small"'
    assert usage["small_tokens"] > 0
    answer = found[f'relaygen_tokens_total{{phase="answer",{labels}}}']
    assert answer == usage["small_tokens"]
    assert f'relaygen_tokens_total{{phase="reasoning",{labels}}}' not in found
    assert found['relaygen_tokens_total{phase="reasoning",policy="pair",role="large"}'] >= 2


async def test_what_engines_had_cached_is_counted(stage: Stage) -> None:
    large = FakeVllm(writes("one", "two"), model="big")
    large.cached = 1
    served = await stage.pair(large, FakeVllm(model="tiny"))
    count = await counted(served)
    await ask(served)
    found = await count.look()
    labels = '{policy="pair",role="large"}'
    sent = found[f"relaygen_sent_tokens_total{labels}"]
    assert found[f"relaygen_cached_tokens_total{labels}"] == 1
    assert found[f"relaygen_prefill_tokens_total{labels}"] == sent - 1


async def test_a_client_that_leaves_is_counted_as_cancelled(stage: Stage) -> None:
    large = FakeVllm(writes("one", silence()), model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    count = await counted(served)
    async with leaving(served.url, stream=True):
        await within(WAIT_S, large.decode())
        found = await count.look()
        assert found["relaygen_in_flight"] == 1
    await within(WAIT_S, large.decodes[0].left.wait())
    found = await _until(count, "relaygen_in_flight")
    assert found["relaygen_in_flight"] == -1
    assert found['relaygen_generations_total{outcome="cancelled",policy="pair"}'] == 1


async def _until(count: Counted, name: str) -> Samples:
    async with asyncio.timeout(WAIT_S):
        while name not in (found := await count.look()):
            pass
    return found


async def test_refusals_are_counted_by_our_own_code(stage: Stage) -> None:
    settings = {"limits": {"generations": 1, "body_mib": 0.001}, "api_keys": ["any"]}
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"), settings)
    count = await counted(served)
    with pytest.raises(openai.RateLimitError):
        await ask(served, n=2)
    with pytest.raises(openai.APIStatusError):
        await ask(served, user="x" * 1100)
    with pytest.raises(openai.NotFoundError):
        await ask(served, model="none")
    with pytest.raises(openai.BadRequestError):
        await ask(served, messages=[])
    assert (await get(served, "/v1/models"))[0] == 401
    assert (await get(served, "/none"))[0] == 401
    assert await count.look() == {
        'relaygen_refused_total{code="too_many_generations"}': 1,
        'relaygen_refused_total{code="body_too_large"}': 1,
        'relaygen_refused_total{code="model_not_found"}': 1,
        'relaygen_refused_total{code="bad_request"}': 1,
        'relaygen_refused_total{code="invalid_api_key"}': 2,
    }


@pytest.mark.parametrize("status", [400, 503])
async def test_what_an_engine_refuses_is_no_label(stage: Stage, status: int) -> None:
    large = FakeVllm(model="big")
    served = await stage.pair(large, FakeVllm(model="tiny"))
    count = await counted(served)
    said = b'{"error": {"message": "no", "code": "theirs"}}'
    large.refusals["/v1/completions"] = (status, said)
    with pytest.raises(openai.APIStatusError):
        await ask(served)
    assert not [name for name in await count.look() if name.startswith("relaygen_refused_total")]


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (RequestError("no", status=429), True),
        (UpstreamError("no", status=503, code="shutting_down"), True),
        (UpstreamError("no", status=502, code="engine_unreachable"), False),
    ],
)
def test_what_broke_is_no_refusal(
    error: RequestError, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[str] = []
    monkeypatch.setattr(metrics, "refused", codes.append)
    metrics.answered(error)
    assert codes == ([str(error.code or "too_many_requests")] if counts else [])


async def test_replicas_are_counted_by_state(stage: Stage) -> None:
    large, dead, small = (FakeVllm(model=m) for m in ("big", "big", "tiny"))
    for engine in (large, dead, small):
        await stage.engine(engine)
    await dead.stop()
    backends = backends_of(large, small)
    backends["large"]["urls"].append(dead.url)
    served = await stage.gateway({"backends": backends}, policy_of(large, small))
    await until_ready(served, 200)
    found = await samples(served.url)
    states = {s: found[f'relaygen_replicas{{backend="large",state="{s}"}}'] for s in ("up", "down")}
    assert states == {"up": 1, "down": 1}


# ---- how it is written --------------------------------------------------------------------------


def _policy() -> Policy:
    share = "calibration: {expected: {small_share: 0.4}}"
    models = "".join(f"{role}: {{backend: {role}, model: m}}\n" for role in Role)
    return load_policy(f"version: 1\nname: {POLICY}\n{models}cues: {{words: [Now]}}\n{share}", "")


def _all_counted() -> None:
    seen, spent = Observed(), Spent(prepare=0.1, total=0.5, lasted=0.5)
    seen.times.values += [(Role.LARGE, 1.5), (Role.SMALL, 2.5)]
    seen.came()
    seen.ended([Handoff(Role.LARGE, Role.SMALL, Trigger.CUE, "Now", 1)], Usage(3))
    seen.closed(Role.SMALL, Usage(3, 4))
    seen.gaps[Role.LARGE].add(0.02, 2)
    metrics.generation(_policy(), "done", Usage(3, 4, 1, 2), seen, spent, Extra())
    metrics.calibrated_share(_policy())
    metrics.upstream_answered("large", 200)
    metrics.shadow(POLICY, "agrees")
    metrics.shadow_seconds(POLICY, 1.0, 2.0)
    metrics.resumed(POLICY, "large", "replica", "reset")
    metrics.upstream_failed("large", "connect")
    metrics.refused("invalid_api_key")
    metrics.small_held(POLICY, True)


NAMES = {
    "relaygen_generations": ("counter", {"policy", "outcome"}),
    "relaygen_resumes": ("counter", {"policy", "role", "to", "cause"}),
    "relaygen_upstream_failures": ("counter", {"backend", "cause"}),
    "relaygen_refused": ("counter", {"code"}),
    "relaygen_internal_errors": ("counter", set()),
    "relaygen_refused_files": ("gauge", set()),
    "relaygen_tokens": ("counter", {"policy", "role", "phase"}),
    "relaygen_time_to_first_token_seconds": ("histogram", {"policy", "le"}),
    "relaygen_generation_seconds": ("histogram", {"policy", "le"}),
    "relaygen_inter_token_seconds": ("histogram", {"policy", "role", "le"}),
    "relaygen_segment_tokens": ("histogram", {"policy", "role", "le"}),
    "relaygen_handoffs": ("counter", {"policy", "to", "trigger", "cue"}),
    "relaygen_large_share": ("histogram", {"policy", "le"}),
    "relaygen_calibrated_large_share": ("gauge", {"policy"}),
    "relaygen_sent_tokens": ("counter", {"policy", "role"}),
    "relaygen_prefill_tokens": ("counter", {"policy", "role"}),
    "relaygen_cached_tokens": ("counter", {"policy", "role"}),
    "relaygen_phase_seconds": ("counter", {"policy", "phase"}),
    "relaygen_upstream_requests": ("counter", {"backend", "outcome", "code"}),
    "relaygen_shadows": ("counter", {"policy", "outcome"}),
    "relaygen_shadow_seconds": ("counter", {"policy", "by"}),
    "relaygen_discarded_tokens": ("counter", {"policy"}),
    "relaygen_handoff_seconds": ("histogram", {"policy", "to", "le"}),
    "relaygen_overlaps": ("counter", {"policy", "outcome"}),
    "relaygen_warm_ups": ("counter", {"policy", "outcome"}),
    "relaygen_extra_tokens": ("counter", {"policy"}),
    "relaygen_generation_efficiency": ("histogram", {"policy", "le"}),
    "relaygen_in_flight": ("gauge", set()),
    "relaygen_queued": ("gauge", set()),
    "relaygen_replicas": ("gauge", {"backend", "state"}),
    "relaygen_small_held": ("gauge", {"policy"}),
}


async def test_names_and_labels_are_those_that_are_promised(stage: Stage) -> None:
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"))
    _all_counted()
    text, content_type = await scrape(served.url)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(text))
    found = {f.name: (f.type, {k for s in f.samples for k in s.labels}) for f in families}
    assert found == NAMES
    for family in families:
        assert not list(_lint(family)), family.name


def _lint(family: Metric) -> list[str]:
    """What `promtool check metrics` would say (client_golang's promlint)."""
    problems = []
    if not family.documentation.strip():
        problems.append("no help text")
    total = any(sample.name.endswith("_total") for sample in family.samples)
    if total != (family.type == "counter"):
        problems.append('"_total" is for counters, and for all of them')
    if family.type != "histogram" and re.search("_(bucket|count|sum)$", family.name):
        problems.append("a suffix of histograms")
    if family.type in family.name or not re.fullmatch("[a-z_]+", family.name):
        problems.append("its type in the name, or not snake_case")
    if re.search("_(ms|milliseconds|minutes|kib|mib|kilobytes|percent)", family.name):
        problems.append("no base unit")
    return problems


async def test_a_scraper_may_ask_for_openmetrics(stage: Stage) -> None:
    served = await stage.pair(FakeVllm(model="big"), FakeVllm(model="tiny"))
    _all_counted()
    text, content_type = await scrape(served.url, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert {family.name for family in open_families(text)} == set(NAMES)


async def test_metrics_need_no_key(stage: Stage) -> None:
    large, small = FakeVllm(model="big"), FakeVllm(model="tiny")
    served = await stage.pair(large, small, {"api_keys": ["secret"]})
    await scrape(served.url)


# ---- workers ------------------------------------------------------------------------------------


async def test_workers_are_added_up_and_leave_nothing(stage: Stage) -> None:
    gate = Gate()
    large = FakeVllm(writes("one", gate), model="big")
    arguments = [*await serve(stage, large), "--port", str(free_port()), "--workers", "2"]
    temporary = stage.folder / "tmp"
    temporary.mkdir()
    async with relaygen(*arguments, env={"TMPDIR": str(temporary)}) as running:
        for _ in range(2):
            url = await running.url()
        # Each connection may be either worker's.
        open_now = [leaving(url, stream=True) for _ in range(6)]
        for leaves in open_now:
            await leaves.__aenter__()
        await within(START_S, large.decode(5))
        found = await _until_sum(url, "relaygen_in_flight", 6)
        assert found['relaygen_replicas{backend="large",state="up"}'] == 1
        gate.opened.set()
        done = 'relaygen_generations_total{outcome="done",policy="pair"}'
        found = await _until_sum(url, done, 6)
        assert _tokens(found, "large") >= 6
        await _until_sum(url, "relaygen_in_flight", 0)
        for leaves in open_now:
            await leaves.__aexit__(None, None, None)
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    assert not list(temporary.iterdir())


async def _until_sum(url: str, name: str, wanted: float) -> Samples:
    async with asyncio.timeout(START_S):
        while (found := await samples(url)).get(name) != wanted:
            await asyncio.sleep(0.05)
    return found


def test_workers_without_a_temporary_folder_are_told(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(stage.folder / "none"))
    arguments = ["serve", "--port", str(free_port()), "--policies", str(stage.folder)]
    assert main([*arguments, "--workers", "2"]) == 1
    said = capsys.readouterr().err
    assert "settings: workers: " in said
    assert "let TMPDIR name a folder that can be written" in said

"""Settings read again while the gateway runs: what takes effect, what waits, what is refused."""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import trustme
import yaml
from structlog.testing import capture_logs

from gateway import reloading
from gateway.reloading import RELOADER, Source
from tests.gateway.fakes import FakeVllm, Gate, writes
from tests.gateway.processes import START_S, free_port, relaygen
from tests.gateway.support import (
    POLICY,
    USER,
    WAIT_S,
    Served,
    Stage,
    ask,
    backends_of,
    gateway,
    get,
    openai_client,
    policy_of,
    stream,
    until_ready,
    within,
)


class Config:
    """A gateway.yaml and the gateway that looks at it."""

    def __init__(self, stage: Stage, large: FakeVllm, small: FakeVllm) -> None:
        self.stage = stage
        self.policy = stage.write("policy.yaml", policy_of(large, small))
        self.content: dict[str, Any] = {
            "policy_files": [str(self.policy)],
            "backends": backends_of(large, small),
        }
        self.path = self.write()

    def write(self, **changes: Any) -> Path:
        self.content |= changes
        return self.stage.write("gateway.yaml", self.content)


@pytest.fixture(autouse=True)
def logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    monkeypatch.setattr(reloading, "_LOOK_S", 0.02)
    with capture_logs() as captured:
        yield captured


@pytest.fixture
async def large(stage: Stage) -> FakeVllm:
    engine = FakeVllm(model="big")
    await stage.engine(engine)
    return engine


@pytest.fixture
async def config(stage: Stage, large: FakeVllm) -> Config:
    small = FakeVllm(model="tiny")
    await stage.engine(small)
    return Config(stage, large, small)


@pytest.fixture
async def served(config: Config) -> AsyncIterator[Served]:
    source = Source({"port": 0}, config.path)
    async with gateway(source.read(), source=source) as running:
        await until_ready(running, 200)
        yield running


async def said(logs: list[Any], event: str) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while not (found := [line for line in logs if line["event"] == event]):
            await asyncio.sleep(0.01)
    return dict(found[-1])


# ---- what takes effect --------------------------------------------------------------------------


async def test_keys_are_replaced(served: Served, config: Config, logs: list[Any]) -> None:
    await ask(served)
    config.write(api_keys=["new"])
    assert (await said(logs, "settings loaded"))["changed"] == ["api_keys"]
    with pytest.raises(openai.AuthenticationError):
        await ask(served)
    async with openai_client(served.url, "new") as client:
        await client.chat.completions.create(model=POLICY, messages=USER)


async def test_limits_are_replaced(served: Served, config: Config, logs: list[Any]) -> None:
    config.write(limits={"generations": 1, "body_mib": 0.001})
    assert (await said(logs, "settings loaded"))["changed"] == [
        "limits.body_mib",
        "limits.generations",
    ]
    with pytest.raises(
        openai.RateLimitError, match=r"2 generations at once, and limits\.generations is 1"
    ):
        await ask(served, n=2)
    with pytest.raises(openai.APIStatusError, match=r"larger than 0\.001 MiB") as caught:
        await ask(served, user="x" * 1100)
    assert caught.value.status_code == 413


async def test_a_replica_that_is_added_serves(
    served: Served, config: Config, stage: Stage, large: FakeVllm, logs: list[Any]
) -> None:
    other = FakeVllm(writes("other"), model="big")
    await stage.engine(other)
    backends = config.content["backends"]
    config.write(backends={**backends, "large": {"urls": [other.url]}})
    assert (await said(logs, "settings loaded"))["changed"] == ["backends"]
    assert (await ask(served))["choices"][0]["message"]["content"] == "other"
    body = await until_ready(served, 200)
    assert [r["url"] for r in body["backends"]["large"]] == [other.url.removesuffix("/v1")]


async def test_a_replica_that_stays_is_not_probed_again(
    served: Served, config: Config, stage: Stage, large: FakeVllm, logs: list[Any]
) -> None:
    other = FakeVllm(model="big")
    await stage.engine(other)
    probes = len(large.asked("/version"))
    backends = config.content["backends"]
    config.write(backends={**backends, "large": {"urls": [other.url, large.url]}})
    await said(logs, "settings loaded")
    body = await until_ready(served, 200)
    assert [r["up"] for r in body["backends"]["large"]][1] is True
    assert len(large.asked("/version")) == probes


async def test_a_generation_goes_on_with_a_replica_that_is_removed(
    served: Served, config: Config, stage: Stage, large: FakeVllm, logs: list[Any]
) -> None:
    gate = Gate()
    large.script = writes("one", gate, " two")
    running = asyncio.create_task(stream(served))
    await within(WAIT_S, gate.reached.wait())
    other = FakeVllm(model="big")
    await stage.engine(other)
    backends = config.content["backends"]
    config.write(backends={**backends, "large": {"urls": [other.url]}})
    await said(logs, "settings loaded")
    gate.opened.set()
    reply = await within(WAIT_S, running)
    assert (reply.text("content"), reply.finishes) == ("one two", ["stop"])
    assert not other.decodes


async def test_a_backend_comes_and_goes(served: Served, config: Config, large: FakeVllm) -> None:
    backends = config.content["backends"]
    config.write(backends={**backends, "spare": {"urls": [large.url]}})
    async with asyncio.timeout(WAIT_S):
        while "spare" not in (await get(served, "/readyz"))[1]["backends"]:
            pass
    config.write(backends=backends)
    async with asyncio.timeout(WAIT_S):
        while "spare" in (await get(served, "/readyz"))[1]["backends"]:
            pass


async def test_a_hangup_reads_policies_at_once(
    served: Served, config: Config, logs: list[Any]
) -> None:
    changed = yaml.safe_load(config.policy.read_text()) | {"name": "renamed"}
    config.policy.write_text(yaml.safe_dump(changed))
    served.app[RELOADER].ask()
    await said(logs, "settings loaded")
    assert (await ask(served, model="renamed"))["choices"][0]["message"]["content"] == "ok"


async def test_a_hangup_reads_a_renewed_certificate(config: Config, tmp_path: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    pem = tmp_path / "both.pem"
    old.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
    tls = {"RELAYGEN_TLS__CERT": str(pem), "RELAYGEN_TLS__KEY": str(pem)}
    async with relaygen("serve", "--port", "0", "--config", str(config.path), env=tls) as running:
        url = await running.url()
        assert url.startswith("https:")
        await _greets(url, old)
        new.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
        running.process.send_signal(signal.SIGHUP)
        await within(START_S, running.said("settings loaded"))
        await _greets(url, new)


async def _greets(url: str, authority: trustme.CA) -> None:
    """Shakes hands with a gateway whose certificate this authority has signed."""
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    port = int(url.rsplit(":", 1)[1])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    writer.close()


# ---- what waits for a restart -------------------------------------------------------------------


async def test_what_needs_a_restart_is_named(
    served: Served, config: Config, logs: list[Any]
) -> None:
    config.write(
        host="127.0.0.2", timeouts={"idle": 7, "drain": 30}, log={"level": "debug"}, api_keys=["k"]
    )
    warning = await said(logs, "settings changed that need a restart")
    assert warning["keys"] == ["host", "timeouts.idle", "log.level"]
    assert warning["log_level"] == "warning"
    assert (await said(logs, "settings loaded"))["changed"] == ["api_keys"]


# ---- what is refused ----------------------------------------------------------------------------

BAD = {
    "no mapping": "just words",
    "an unknown key": "prot: 1",
    "no file that it names": "backends: {large: {urls: ['https://a/v1'], ca: none.pem}}",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
async def test_a_bad_file_is_refused_and_the_old_settings_stay(
    served: Served, config: Config, text: str, logs: list[Any]
) -> None:
    config.path.write_text(text)
    refused = await said(logs, "settings refused")
    body = await until_ready(served, 200)
    assert body["refused"] == {str(config.path): refused["problems"]}
    assert refused["problems"][0].startswith("settings: ")
    assert (await ask(served))["choices"][0]["message"]["content"] == "ok"
    config.write()
    await said(logs, "settings loaded")
    assert (await until_ready(served, 200))["refused"] == {}


async def test_a_file_that_is_gone_is_refused(
    served: Served, config: Config, logs: list[Any]
) -> None:
    config.path.unlink()
    assert "is not a file" in (await said(logs, "settings refused"))["problems"][0]
    await ask(served)


async def test_a_refused_file_is_told_once(served: Served, config: Config, logs: list[Any]) -> None:
    config.path.write_text("prot: 1")
    await said(logs, "settings refused")
    config.policy.touch()
    await asyncio.sleep(5 * reloading._LOOK_S)  # more looks at the same file
    assert [line["event"] for line in logs].count("settings refused") == 1


# ---- workers ------------------------------------------------------------------------------------


async def test_a_hangup_reaches_all_workers(config: Config, monkeypatch: Any) -> None:
    port = free_port()
    arguments = ("serve", "--config", str(config.path), "--port", str(port), "--workers", "2")
    async with relaygen(*arguments) as running:
        for _ in range(2):
            await running.url()
        config.policy.touch()
        running.process.send_signal(signal.SIGHUP)
        for _ in range(2):
            await within(START_S, running.said("settings loaded"))
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0

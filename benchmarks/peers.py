"""The same stream through other gateways, beside this one, in one run on one machine.

    make bench-peers                          # installs what is missing, then measures
    python benchmarks/peers.py --only nginx

nginx, LiteLLM's proxy and SGLang's router pass a stream of the large model through, each as one
process with the settings that its own documentation recommends: no database, no callbacks, no
buffering. Only `relayed` reads the tokens and relays. Each peer lives in a folder of its own under
.venv-peers; root is not needed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
import venv
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import aiohttp
import yaml
from rich.console import Console
from rich.table import Table

from gateway.bench.engine import NAMES
from gateway.bench.script import ANSWER
from gateway.bench.stage import Stage, loaded, staged
from gateway.demo.processes import HOST, free_port

PEERS = Path(__file__).parents[1] / ".venv-peers"
KEY = f"sk-{secrets.token_hex(16)}"
"""LiteLLM does not start without one."""
TOKENS = 500
STREAMS = 32
_START_S = 90.0
_POLL_S = 0.2
_GRACE_S = 10.0
_FIRSTS = 50
_LONG_S = 3.0
_MORE = 10
"""Requests a stream, where one each is over in less."""
_NGINX = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr error;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream engine {{ server {engine}; keepalive 64; }}
  server {{
    listen {host}:{port};
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_read_timeout 600s; client_max_body_size 64m;
    }}
  }}
}}
"""


# ---- installing ---------------------------------------------------------------------------------


def _pip(name: str, requirement: str) -> None:
    folder = PEERS / name
    if not (folder / "bin" / "pip").exists():
        venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", requirement], check=True)


def _nginx() -> None:
    folder = PEERS / "nginx"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "nginx"], cwd=folder, check=True)
    for package in folder.glob("nginx_*.deb"):
        subprocess.run(["dpkg", "-x", package, folder], check=True)


INSTALLS: dict[str, tuple[Callable[[], None], str]] = {
    "nginx": (_nginx, "usr/sbin/nginx"),
    "litellm": (lambda: _pip("litellm", "litellm[proxy]"), "bin/litellm"),
    "sglang-router": (lambda: _pip("sglang-router", "sglang-router"), "bin/sglang-router"),
}


def install(name: str) -> bool:
    """Whether a peer is there now; says why where it is not."""
    action, program = INSTALLS[name]
    if not (PEERS / name / program).exists():
        try:
            action()
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{name}: left out, it does not install: {error}", file=sys.stderr)
    return (PEERS / name / program).exists()


# ---- running ------------------------------------------------------------------------------------


def command(name: str, engine: str, port: int, folder: Path) -> list[str]:
    """How a peer is started in front of an engine's URL; its files go to `folder`."""
    program = str(PEERS / name / INSTALLS[name][1])
    match name:
        case "nginx":
            file, address = folder / "nginx.conf", engine.removeprefix("http://")
            file.write_text(_NGINX.format(folder=folder, engine=address, host=HOST, port=port))
            return [program, "-p", str(folder), "-c", str(file), "-e", "stderr"]
        case "litellm":
            file = folder / "config.yaml"
            parameters = {"model": f"openai/{NAMES[0]}", "api_base": f"{engine}/v1", "api_key": "-"}
            model = {"model_name": NAMES[0], "litellm_params": parameters}
            file.write_text(yaml.safe_dump({"model_list": [model]}))
            where = ["--host", HOST, "--port", str(port)]
            return [program, "--config", str(file), *where, "--num_workers", "1"]
        case _:
            where = ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())]
            python = str(PEERS / name / "bin" / "python")
            launch = [python, "-m", "sglang_router.launch_router", *where]
            return [*launch, "--worker-urls", engine, "--policy", "round_robin"]


@asynccontextmanager
async def running(name: str, engine: str) -> AsyncIterator[str]:
    """A peer's URL, once it serves. Raises RuntimeError when it does not."""
    quiet = {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION", "LITELLM_MASTER_KEY": KEY}
    local = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": HOST, "no_proxy": HOST}
    with TemporaryDirectory() as folder:
        port = free_port()
        process = await asyncio.create_subprocess_exec(
            *command(name, engine, port, Path(folder)),
            stdout=DEVNULL, stderr=DEVNULL, start_new_session=True,
            env={**os.environ, **quiet, **local},
        )  # fmt: skip
        try:
            await _serves(name, process, f"http://{HOST}:{port}")
            yield f"http://{HOST}:{port}"
        finally:
            await _end(process)


async def _serves(name: str, process: Process, url: str) -> None:
    body = {"model": NAMES[0], "messages": [{"role": "user", "content": "Hi"}], "stream": True}
    bearer = {"Authorization": f"Bearer {KEY}"}
    async with asyncio.timeout(_START_S), aiohttp.ClientSession(headers=bearer) as session:
        while process.returncode is None:
            with suppress(aiohttp.ClientError):
                async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                    await answer.read()
                    if answer.status == 200:
                        return
            await asyncio.sleep(_POLL_S)
    raise RuntimeError(f"{name} ended with status {process.returncode}")


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


# ---- measuring ----------------------------------------------------------------------------------


class Measured:
    """Of one way through: milliseconds to the first token, tokens a second, by round."""

    def __init__(self) -> None:
        self.first_ms: list[float] = []
        self.rates: list[float] = []
        self.errors = 0


Way = Callable[..., Awaitable[dict[str, Any]]]


async def measure(names: list[str], rounds: int) -> dict[str, Measured]:
    """All ways in turn, `rounds` times."""
    async with AsyncExitStack() as stack:
        stage = await stack.enter_async_context(staged(tokens=TOKENS))
        ways = _own(stage)
        for name in names:
            try:
                url = await stack.enter_async_context(running(name, stage.large))
            except (RuntimeError, TimeoutError) as error:
                print(f"{name}: left out, it does not serve: {error!r}", file=sys.stderr)
                continue
            ways[name] = _through(url)
        found = {name: Measured() for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                await _round(way, found[name])
        return found


def _own(stage: Stage) -> dict[str, Way]:
    return {
        "the engine itself": stage.direct,
        "relaygen, passed through": stage.passthrough,
        "relaygen, relayed": stage.relay,
    }


def _through(url: str) -> Way:
    async def way(**load: object) -> dict[str, Any]:
        return await loaded(url, NAMES[0], key=KEY, **load)

    return way


async def _round(way: Way, found: Measured) -> None:
    one = await way(requests=_FIRSTS, max_tokens=4)
    many, requests = await way(streams=STREAMS), 1
    if many["seconds"] < _LONG_S:
        many, requests = await way(streams=STREAMS, requests=_MORE), _MORE
    found.first_ms += one["first_ms"][1:]
    tokens = STREAMS * requests * (TOKENS + ANSWER + 2)  # a chunk may hold several
    found.rates.append(tokens / many["seconds"])
    found.errors += one["errors"] + many["errors"]


def table(found: dict[str, Measured]) -> Table:
    shown = Table(title=f"The same stream through others, {STREAMS} streams, in one run")
    for column in ("through", "first token ms", "added ms", "tokens/s", "of direct", "errors"):
        shown.add_column(column, justify="left" if column == "through" else "right")
    direct, *_ = found.values()
    base_ms, base_rate = median(direct.first_ms), median(direct.rates)
    for name, measured in found.items():
        first, rate = median(measured.first_ms or [float("nan")]), median(measured.rates)
        shown.add_row(
            name, f"{first:.2f}", f"{first - base_ms:.2f}", f"{rate:,.0f}",
            f"{rate / base_rate:.3f}", str(measured.errors),
        )  # fmt: skip
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="NAME,...", help=f"of {', '.join(INSTALLS)}")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(INSTALLS)
    if unknown := [name for name in names if name not in INSTALLS]:
        parser.error(f"--only: unknown {', '.join(unknown)}; there are {', '.join(INSTALLS)}")
    found = asyncio.run(measure([name for name in names if install(name)], options.rounds))
    Console().print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

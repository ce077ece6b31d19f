"""docker-compose.yml: each profile whole and consistent, its commands taken by what they start."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from check_jsonschema import main as check_jsonschema

from gateway.cli import main
from gateway.policies import read_policy
from tests.deploy.compose import (
    ENGINES,
    ENV,
    FILE,
    PROFILES,
    ROOT,
    environment,
    profile,
    services,
    variables,
)
from tests.gateway.processes import free_port
from tests.gateway.support import openai_client, within

START_S = 60.0


def test_it_fits_the_schema_of_compose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_jsonschema(
            ["--builtin-schema", "vendor.compose-spec", str(FILE)], prog_name="check-jsonschema"
        )
    assert ended.value.code == 0, capsys.readouterr().out


@pytest.mark.parametrize("name", PROFILES)
def test_compose_itself_takes_every_profile(name: str) -> None:
    command = _compose()
    if command is None:
        pytest.skip("no Docker Compose here")
    ran = subprocess.run(
        [*command, "--profile", name, "config"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def _compose() -> list[str] | None:
    """Version 2, or the one before it."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]):
            ran = subprocess.run([*command, "version"], capture_output=True)
            if ran.returncode == 0:
                return command
    return None


# ---- what is in a profile -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_a_profile_has_a_gateway_that_waits_for_its_two_engines(name: str) -> None:
    found = profile(name)
    assert len(found.services) == 3
    engines = {n for n in found.services if not n.startswith("gateway")}
    waits = found.gateway["depends_on"]
    assert all(wait == {"condition": "service_healthy"} for wait in waits.values())
    assert set(waits) == engines
    for role in ("large", "small"):
        engine = found.engine(role)
        assert engine["healthcheck"]["test"]
        assert set(engine.get("depends_on", {})) <= engines
        assert f"--{role}=http://{role}:8000/v1" in found.gateway["command"]
        assert "--port=8000" in engine["command"]


def test_every_service_is_in_a_known_profile() -> None:
    assert {p for s in services().values() for p in s["profiles"]} == set(PROFILES)


@pytest.mark.parametrize("name", ENGINES)
def test_the_policy_names_the_models_that_are_served(name: str) -> None:
    found = profile(name)
    [file] = [a.partition("=")[2] for a in found.gateway["command"] if a.startswith("--policy=")]
    policy = read_policy(ROOT / file)
    for role, spec in (("large", policy.large), ("small", policy.small)):
        command = " ".join(found.engine(role)["command"])
        assert (f"engine {role}" if name == "cpu" else f"={spec.model} ") in f"{command} "


@pytest.mark.parametrize("name", ENGINES)
def test_a_gateway_holds_nothing_and_may_do_nothing(name: str) -> None:
    gateway = profile(name).gateway
    assert gateway["read_only"] is True
    assert gateway["cap_drop"] == ["ALL"]
    assert gateway["ports"] == ["127.0.0.1:8080:8080"]
    assert gateway["volumes"] == ["./policies:/app/policies:ro"]


def test_images_are_built_from_stages_that_exist() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    targets = {s["build"]["target"] for s in services().values() if "build" in s}
    assert targets == {"gateway", "demo"}
    assert all(f" AS {target}\n" in dockerfile for target in targets)


def test_folders_that_are_mounted_exist() -> None:
    mounts = {v for s in services().values() for v in s.get("volumes", ()) if v.startswith("./")}
    for mount in mounts:
        assert (ROOT / mount.split(":")[0]).is_dir(), mount


# ---- variables ----------------------------------------------------------------------------------


def test_defaults_are_those_of_env() -> None:
    known = variables()
    for name, value in environment().items():
        if name == "COMPOSE_PROFILES":
            assert value in ENGINES
        else:
            assert known[name] == {value}, f"{name} in {ENV.name} and docker-compose.yml"


def test_one_variable_has_one_default() -> None:
    assert {name: found for name, found in variables().items() if len(found) != 1} == {}


def test_a_variable_changes_what_it_says() -> None:
    given = environment() | {"LARGE_GPUS": "2,3", "LARGE_TENSOR_PARALLEL": "2"}
    large = services(given)["vllm-large"]
    assert large["environment"]["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "--tensor-parallel-size=2" in large["command"]


# ---- the commands -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_the_gateway_takes_its_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = profile(name).gateway
    command = [a.replace("policies/", f"{ROOT}/policies/") for a in gateway["command"]]
    assert main([*command, "--print-settings"]) == 0
    assert "http://large:8000/v1" in capsys.readouterr().out


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "role"), [("vllm", "large"), ("vllm", "small"), ("eagle3", "large")]
)
def test_vllm_takes_its_command(name: str, role: str) -> None:
    command = profile(name).engine(role)["command"]
    python = ROOT / ".venv-vllm" / "bin" / "python"
    ran = subprocess.run([python, "-c", _VLLM_PARSES, *command], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split()[-1] == command[0]


_VLLM_PARSES = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser  # as of 0.32
from vllm.utils.argparse_utils import FlexibleArgumentParser
print(make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:]).model_tag)
"""


async def test_the_cpu_profiles_commands_serve_a_relay() -> None:
    found = profile("cpu")
    async with AsyncExitStack() as stack:
        urls = {}
        for role in ("large", "small"):
            command, url = _here(found.engine(role)["command"])
            await stack.enter_async_context(running(command))
            urls[role] = url
        for url in urls.values():
            await answering(f"{url}/health")
        command, url = _here([*found.gateway["command"], "--port=8000"], urls)
        await stack.enter_async_context(running(command))
        await answering(f"{url}/readyz")
        async with openai_client(url) as client:
            reply = await client.chat.completions.create(
                model="tiny-pair",
                messages=[{"role": "user", "content": "What is 12 + 30 - 5?"}],
                max_tokens=400,
            )
    usage = reply.to_dict()["usage"]["relaygen"]  # type: ignore[index]
    assert usage["handoffs"] >= 1
    assert usage["small_tokens"] > 0 < usage["large_tokens"]


def _here(command: list[str], urls: Mapping[str, str] = {}) -> tuple[list[str], str]:
    """The command on this machine's loopback, at a free port, and where it listens."""
    port = free_port()
    changed = []
    for argument in command:
        argument = argument.replace("--host=0.0.0.0", "--host=127.0.0.1")
        argument = argument.replace("--port=8000", f"--port={port}")
        for role, url in urls.items():
            argument = argument.replace(f"http://{role}:8000", url)
        changed.append(argument)
    return changed, f"http://127.0.0.1:{port}"


@asynccontextmanager
async def running(command: list[str]) -> AsyncIterator[None]:
    """`relaygen COMMAND`, as the image's entry point runs it: with nothing on its stdin."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        yield
        assert process.returncode is None
    finally:
        if process.returncode is None:
            process.terminate()
        assert await within(START_S, process.wait()) in (0, -15)


async def answering(url: str) -> None:
    """Waits until it answers 200, as the health check of a container does."""
    async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)

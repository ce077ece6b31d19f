"""Every command that the pages tell users is run here, or checked by whatever takes it.

One that no rule below fits fails: a page can't gain a command that nothing looks at.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tomllib
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from gateway.demo.problems import problems
from gateway.policies import read_policy
from tests.clients.support import Running, tiny_relay
from tests.deploy.compose import PROFILES, services
from tests.docs.cli import parsed
from tests.docs.pages import ROOT, Command, commands
from tests.gateway.support import within

pytestmark = pytest.mark.asyncio(loop_scope="module")

END_S = 100.0
_TINY = str(ROOT / "policies" / "tiny-pair.yaml")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with tiny_relay() as found:
        yield found


@dataclass(frozen=True)
class Here:
    """Where a command runs: real engines, a gateway, a folder of its own."""

    running: Running
    folder: Path


@pytest.mark.parametrize("command", commands(), ids=str)
async def test_a_command_works(command: Command, running: Running, tmp_path: Path) -> None:
    [rule] = [rule for beginning, rule in RULES.items() if re.match(beginning, command.text)] or [
        None
    ]
    assert rule is not None, f"no test for it: {command}"
    done = rule(command, Here(running, tmp_path))
    if done is not None:
        await done


# ---- ours ---------------------------------------------------------------------------------------


async def _relaygen(command: Command, here: Here) -> None:
    words = command.words[1:]
    options = parsed(words)
    if options.command in ("serve", "engine"):
        await _starts(["-m", "gateway", *_local(words, here)], here)
        return
    if options.command == "calibrate":
        _write_problems(here.folder / "problems.jsonl")
        words = [*words, "--samples", "1", "--temperature", "0", "--max-tokens", "600"]
    if options.command == "demo":
        words = [*words, "--once", "--problems", "2", "--port", "0"]
    found = await _runs(["-m", "gateway", *_local(words, here)], here)
    assert found in ((0, 1) if words[:2] == ["policy", "diff"] else (0,))
    if options.command == "calibrate":
        assert read_policy(here.folder / options.out).cues.words


async def _python(command: Command, here: Here) -> None:
    words, _, out = command.text.partition(" > ")
    arguments = _local(words.removesuffix("&").split()[1:], here)
    if "gateway.demo.llamacpp" in arguments:
        await _starts(arguments, here)
        return
    if "--problems" in arguments:
        arguments += ["--problems", "2", "--trial", "2"]
    assert await _runs(arguments, here, here.folder / out if out else None) == 0


def _local(words: list[str], here: Here) -> list[str]:
    """Hosts, ports and models of the page, as they are here."""
    found = []
    served = "serve" in words
    for word in words:
        word = re.sub(r"http://(gpu1|127\.0\.0\.1):8001", here.running.large, word)
        word = re.sub(r"http://(gpu2|127\.0\.0\.1):8002", here.running.small, word)
        if served and word.endswith(".yaml"):
            word = _TINY
        elif re.match(r"(policies|gateway|benchmarks)/", word) and (ROOT / word).exists():
            word = str(ROOT / word)
        found.append(word)
    found = [_port(before, word) for before, word in pairwise(["", *found])]
    if "--out" in found:
        at = found.index("--out") + 1
        (here.folder / found[at]).parent.mkdir(exist_ok=True)
    return [*found, "--port", "0"] if served else found


def _port(before: str, word: str) -> str:
    return "0" if before == "--port" else word


async def _runs(arguments: list[str], here: Here, out: Path | None = None) -> int:
    process = await _python_process(arguments, here)
    told, said = await within(END_S, process.communicate(b"Now, it is so. It is."))
    if out is not None:
        out.write_bytes(told)
    assert process.returncode is not None
    assert process.returncode in (0, 1), said.decode()[-2000:]
    return process.returncode


async def _starts(arguments: list[str], here: Here) -> None:
    """It says that it listens, and ends when told to."""
    process = await _python_process(arguments, here)
    try:
        await within(END_S, _says(process))
    finally:
        process.terminate()
        await within(END_S, process.communicate())


async def _says(process: Process) -> None:
    async def in_(stream: asyncio.StreamReader | None) -> None:
        assert stream is not None
        while line := await stream.readline():
            if b"listening" in line or line.startswith(b"ready"):
                return
        await asyncio.Event().wait()

    _, waiting = await asyncio.wait(
        [asyncio.ensure_future(in_(stream)) for stream in (process.stdout, process.stderr)],
        return_when=asyncio.FIRST_COMPLETED,
    )
    for task in waiting:
        task.cancel()


async def _python_process(arguments: list[str], here: Here) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments), cwd=here.folder, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )


def _write_problems(path: Path) -> None:
    lines = (json.dumps({"question": p.question}) for p in problems(30, seed=2602))
    path.write_text("\n".join(lines))


async def _curl(command: Command, here: Here) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    own = re.compile(r"(http://127\.0\.0\.1|localhost):8080")
    words = [own.sub(here.running.url, word) for word in command.words]
    process = await asyncio.create_subprocess_exec(
        *(words[0], "--fail", "--silent", "--noproxy", "*", *words[1:]), stdin=DEVNULL, stdout=PIPE
    )
    told, _ = await within(END_S, process.communicate())
    assert process.returncode == 0
    assert told


def _make(command: Command, here: Here) -> None:
    done = subprocess.run(["make", "-n", *command.words[1:]], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


def _pip(command: Command, here: Here) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\[([\w,]+)\]", command.text):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])


# ---- what takes our files -----------------------------------------------------------------------


def _compose(command: Command, here: Here) -> None:
    words = command.words[2:]
    while words and words[0] == "--profile":
        assert words[1] in PROFILES
        words = words[2:]
    assert words[0] in ("up", "logs", "down", "ps")
    named = [word for word in words[1:] if not word.startswith("-")]
    assert set(named) <= set(services())


def _docker(command: Command, here: Here) -> None:
    words, dockerfile = command.words, (ROOT / "Dockerfile").read_text(encoding="utf-8")
    if words[1] == "build":
        if "--target" in words:
            assert f" AS {words[words.index('--target') + 1]}\n" in dockerfile
        return
    assert words[1] == "run"
    at = next(i for i, word in enumerate(words) if word.startswith("relaygen"))
    parsed(words[at + 1 :] or ["serve"])


def _cd(command: Command, here: Here) -> None:
    assert (ROOT / command.words[1]).is_dir()


def _kubectl(command: Command, here: Here) -> None:
    """What it names is in the manifests; what needs no cluster is run."""
    words = command.words
    manifests = _manifests()
    if "-k" in words and words[words.index("-k") + 1] != ".":
        assert (ROOT / words[words.index("-k") + 1] / "kustomization.yaml").is_file()
    for kind, name in re.findall(r"\b(deployment|service)/([\w-]+)", command.text):
        assert re.search(rf"kind: {kind.title()}\nmetadata:\n  name: {name}\b", manifests)
    if "secret" in words:
        assert f"name: {words[words.index('generic') + 1]}" in manifests
    if "create" in words and shutil.which("kubectl"):
        done = subprocess.run([*words, "--dry-run=client", "-o", "yaml"], capture_output=True)
        assert done.returncode == 0, done.stderr


def _helm(command: Command, here: Here) -> None:
    assert (ROOT / command.words[command.words.index("-f") + 1]).is_file()


def _kustomize(command: Command, here: Here) -> None:
    words = command.words
    assert words[:4] == ["kustomize", "edit", "set", "image"]
    assert f"name: {words[4].partition('=')[0]}" in _manifests()


def _manifests() -> str:
    files = sorted((ROOT / "deploy" / "kubernetes").glob("**/*.yaml"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def _promtool(command: Command, here: Here) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool")
    done = subprocess.run(command.words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- other people's programs: their flags, as they document them --------------------------------


def _flags(*known: str) -> Callable[[Command, Here], None]:
    def check(command: Command, here: Here) -> None:
        flags = {word for word in command.words if word.startswith("-") and len(word) > 2}
        assert flags <= set(known)

    return check


RULES: dict[str, Callable[[Command, Here], object]] = {
    r"relaygen ": _relaygen,
    r"\.venv/bin/relaygen ": _relaygen,
    r"(\.venv/bin/)?python (-m gateway|benchmarks)": _python,
    r"curl ": _curl,
    r"make ": _make,
    r"pip install ": _pip,
    r"docker compose ": _compose,
    r"docker (build|run) ": _docker,
    r"cd ": _cd,
    r"helm ": _helm,
    r"kubectl ": _kubectl,
    r"kustomize ": _kustomize,
    r"promtool ": _promtool,
    r"vllm serve ": _flags("--port", "--enable-prefix-caching", "--enable-prompt-tokens-details"),
    r"python -m sglang": _flags("--model-path", "--port", "--enable-cache-report"),
    r"text-generation-launcher ": _flags("--model-id", "--port"),
    r"llama-server ": _flags("--port", "--parallel", "--ctx-size"),
}

"""The container image: what it is built from, and that the gateway runs as it runs there."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import tokenizers
from tests.gateway.fakes import FakeVllm
from tests.gateway.processes import START_S, free_port, relaygen, serve
from tests.gateway.support import POLICY, USER, Stage, openai_client, within

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "gateway" / "demo" / "pair" / "large-hf"
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
STAGES = {stage.split()[2]: stage for stage in DOCKERFILE.split("\nFROM ")[1:]}
"""By name, from what each begins with on."""

# Every process under this name on PYTHONPATH can write to one folder only, and to devices.
READ_ONLY = """
import errno, os, sys
allowed = (os.environ["TMPDIR"], "/dev/")
writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
changing = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod"}
def hook(event, arguments):
    folder = os.curdir
    if event == "open" and isinstance(arguments[0], str | bytes) and arguments[2] & writes:
        pass
    elif event not in changing:
        return
    elif arguments[-1] >= 0:  # dir_fd
        folder = os.readlink(f"/proc/self/fd/{arguments[-1]}")
    path = os.path.join(folder, os.fsdecode(arguments[0]))
    if not os.path.abspath(path).startswith(allowed):
        raise OSError(errno.EROFS, "Read-only file system", path)
sys.addaudithook(hook)
"""


@pytest.fixture
def read_only(tmp_path: Path) -> dict[str, str]:
    """The environment of a container with a read-only root."""
    for name in ("hook", "home", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(READ_ONLY)
    (tmp_path / "home").chmod(0o555)
    return {
        "PYTHONPATH": f"{tmp_path / 'hook'}:{ROOT}",
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


async def test_it_serves_from_a_read_only_root(stage: Stage, read_only: dict[str, str]) -> None:
    home, temporary = Path(read_only["HOME"]), Path(read_only["TMPDIR"])
    arguments = [*await serve(stage, FakeVllm(model="big")), "--port", str(free_port())]
    async with relaygen(*arguments, "--workers", "2", env=read_only, cwd=home) as running:
        for _ in range(2):
            url = await running.url()
        async with openai_client(url) as client:
            reply = await client.chat.completions.create(model=POLICY, messages=USER)
        assert reply.choices[0].message.content == "ok"
        health = _instruction("HEALTHCHECK").partition("CMD ")[2]
        _, *check = json.loads(health)
        for place, status in (("/healthz", 0), ("/none", 1)):
            asked = await _exit_status([sys.executable, *check], HEALTH_URL=url + place)
            assert asked == status
        running.process.send_signal(signal.SIGTERM)
        assert await running.ended() == 0
    assert not [*home.iterdir(), *temporary.iterdir()]


async def _exit_status(command: list[str], **env: str) -> int:
    process = await asyncio.create_subprocess_exec(
        *command, env=env, stderr=asyncio.subprocess.DEVNULL
    )
    return await within(START_S, process.wait())


def test_the_hook_is_a_read_only_root(read_only: dict[str, str], tmp_path: Path) -> None:
    code = "import pathlib, sys; pathlib.Path(sys.argv[1], 'x').write_text('x')"
    for folder, fails in ((read_only["TMPDIR"], False), (tmp_path, True)):
        command = [sys.executable, "-c", code, str(folder)]
        done = subprocess.run(command, env=read_only, capture_output=True, check=False)
        assert (b"Read-only" in done.stderr) is fails


def test_a_tokenizer_loads_where_the_home_folder_cannot_be_written(
    read_only: dict[str, str],
) -> None:
    code = (
        "import asyncio, sys; from gateway.tokenizers import LocalTokenizer, _cache_dir;"
        "ids = asyncio.run(LocalTokenizer(sys.argv[1]).tokenize('m', 'Hi'));"
        "assert ids; print(_cache_dir())"
    )
    command = [sys.executable, "-c", code, str(FOLDER)]
    done = subprocess.run(command, env=read_only, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(Path(read_only["TMPDIR"], "relaygen-hub"))


def test_the_hubs_own_cache_is_used_where_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert tokenizers._cache_dir() is None


# ---- the Dockerfile -----------------------------------------------------------------------------


def _instruction(name: str, stage: str = STAGES["base"]) -> str:
    [found] = re.findall(rf"^{name} (.*)$", stage, re.MULTILINE)
    return str(found)


def test_it_runs_as_a_fixed_user_without_rights() -> None:
    user, group = _instruction("USER").split(":")
    assert min(int(user), int(group)) >= 10000


def test_it_starts_the_gateway_where_a_container_is_reached() -> None:
    assert json.loads(_instruction("ENTRYPOINT")) == ["relaygen"]
    assert json.loads(_instruction("CMD")) == ["serve", "--host", "0.0.0.0"]
    assert _instruction("EXPOSE") == "8080"
    begin = {name: stage.split()[0] for name, stage in STAGES.items()}
    slim = "python:3.12-slim"
    assert begin == {
        "build": slim,
        "build-demo": "build",
        "base": slim,
        "demo": "base",
        "gateway": "base",
    }
    assert list(STAGES)[-1] == "gateway"  # what is built unless a target is named


def test_all_that_it_copies_is_there_and_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for stage in STAGES.values()
        for line in re.findall(r"^COPY (?!--from)(.*)$", stage, re.MULTILINE)
        for source in line.split()[:-1]
    }
    assert copied == kept
    assert all((ROOT / source).exists() for source in copied)

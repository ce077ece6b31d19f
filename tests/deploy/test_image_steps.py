"""The Dockerfile's steps, run in a folder of their own where there is no Docker: what is copied is
enough to install, and what was installed serves.

    make test-image
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.demo.paths import bundled_policy
from tests.deploy.compose import ROOT
from tests.deploy.test_compose import answering
from tests.gateway.processes import free_port
from tests.gateway.support import openai_client, within

pytestmark = pytest.mark.image
END_S = 30.0


@dataclass(frozen=True)
class Image:
    """What a target leaves: its root, and its instructions."""

    root: Path
    instructions: list[tuple[str, str]]

    def path(self, inside: str) -> Path:
        return self.root / inside.removeprefix("/")

    def last(self, name: str) -> str:
        return [text for found, text in self.instructions if found == name][-1]


def stages() -> dict[str, tuple[str, list[tuple[str, str]]]]:
    """By name: what each begins with, and its instructions."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, rest = line.partition(" ")
        if name == "FROM":
            base, _, stage = rest.split()
            found[stage] = (base, steps := [])
        else:
            steps.append((name, rest))
    return found


def built(target: str, folder: Path, done: dict[str, Image]) -> Image:
    """Runs the steps of a target and of all that it builds on."""
    if target in done:
        return done[target]
    base, steps = stages()[target]
    image = Image(folder / target, [])
    if base in stages():
        below = built(base, folder, done)
        shutil.copytree(below.root, image.root, symlinks=True)
        image.instructions.extend(below.instructions)
    here = image.last("WORKDIR") if image.instructions else "/"
    image.instructions.extend(steps)
    for name, text in steps:
        match name:
            case "WORKDIR":
                here = text
                image.path(here).mkdir(parents=True, exist_ok=True)
            case "COPY":
                _copy(text, image, here, folder, done)
            case "RUN":
                _run(text, image, here)
    done[target] = image
    return image


def _copy(text: str, image: Image, here: str, folder: Path, done: dict[str, Image]) -> None:
    if found := re.match(r"--from=(\S+) (\S+) (\S+)$", text):
        source = built(found[1], folder, done).path(found[2])
        shutil.copytree(source, image.path(found[3]), symlinks=True)
        return
    *sources, target = text.split()
    for source in sources:
        into = image.path(here) / target
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, into, ignore=ignored, dirs_exist_ok=True)
        else:
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, into)


def _run(text: str, image: Image, here: str) -> None:
    """Absolute paths are the image's, and its Python this one."""
    moved = text.replace("/opt/", f"{image.root}/opt/")
    moved = re.sub(r"^python ", f"{sys.executable} ", moved)
    # A virtual environment's scripts know where they were made: run as its python's modules.
    moved = re.sub(r"(\S+)/bin/pip ", r"\1/bin/python -m pip ", moved)
    done = subprocess.run(moved, shell=True, cwd=image.path(here), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("image")


@pytest.fixture(scope="module")
def done() -> dict[str, Image]:
    return {}


@asynccontextmanager
async def running(image: Image, *arguments: str) -> AsyncIterator[None]:
    """The entry point with these arguments, in an environment that knows nothing else."""
    assert json.loads(image.last("ENTRYPOINT")) == ["relaygen"]
    process = await asyncio.create_subprocess_exec(
        *(str(image.path("/opt/relaygen/bin/python")), "-m", "gateway", *arguments),
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
        cwd=image.path("/app"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.terminate()
        await within(END_S, process.wait())


@pytest.mark.timeout(900)
async def test_the_images_steps_make_a_pair_that_relays(
    folder: Path, done: dict[str, Image]
) -> None:
    demo, gateway = (built(target, folder, done) for target in ("demo", "gateway"))
    ports = {role: free_port() for role in ("large", "small", "gateway")}
    urls = {role: f"http://127.0.0.1:{port}" for role, port in ports.items()}
    policy = gateway.path("/app/policies") / bundled_policy("tiny-pair").name
    async with (
        running(demo, "engine", "large", "--port", str(ports["large"])),
        running(demo, "engine", "small", "--port", str(ports["small"])),
        running(
            gateway,
            *("serve", "--port", str(ports["gateway"]), "--policy", str(policy)),
            *(f"--{role}={urls[role]}/v1" for role in ("large", "small")),
        ),
    ):
        await answering(f"{urls['gateway']}/readyz")
        async with openai_client(urls["gateway"]) as client:
            question = {"role": "user", "content": "What is 12 + 30 - 5?"}
            reply = await client.chat.completions.create(model="tiny-pair", messages=[question])
    assert reply.to_dict()["usage"]["relaygen"]["handoffs"] >= 1  # type: ignore[index]


@pytest.mark.timeout(900)
def test_the_gateways_image_has_no_engine_and_can_trace(
    folder: Path, done: dict[str, Image]
) -> None:
    gateway = built("gateway", folder, done)
    python = gateway.path("/opt/relaygen/bin/python")
    listed = subprocess.run([python, "-m", "pip", "list"], capture_output=True, text=True).stdout
    for package in ("torch", "xllamacpp", "vllm", "nvidia"):
        assert package not in listed
    traces = "import gateway.otel"
    assert subprocess.run([python, "-c", traces], cwd="/", capture_output=True).returncode == 0

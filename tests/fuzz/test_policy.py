"""Policy files near valid ones: a policy, or all that is wrong with it, and soon."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml
from hypothesis import strategies as st

from gateway.policies import read_policy
from relaygen.errors import PolicyError
from relaygen.policy import Policy, policy_warnings
from tests.fuzz.bodies import spoil
from tests.fuzz.support import SECONDS, fuzz

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(10 * SECONDS + 300)]

LONGEST_S = 20.0
FILE = Path(__file__).parents[2] / "policies" / "tiny-pair.yaml"
ODD = st.sampled_from(
    [
        b"&a ",
        b"*a ",
        b"*a",
        b"<<: *a\n",
        b"? ",
        b": ",
        b"- ",
        b"!!int ",
        b"!!set ",
        b"!!binary ",
        b"\0",
        b"[",
        b"]",
        b"{",
        b"}",
        b"\xff",
        b"---\n",
        b"...\n",
        b"%YAML 1.1\n",
        b"1:0:0",
        b"0x" + b"f" * 99,
        b"9" * 5000,
        b"1e999",
        b".nan",
        b"2024-13-45",
        b"|\n",
        b">-\n",
        b"'",
        b'"',
        b"\t",
        b"#",
        b"~",
        b"[" * 300,
        b"- " * 300,
        b"a: " * 99,
        b"&a [*a]",
        b"!!omap ",
        b"!!python/object:os.x ",
        b"\n",
    ]
)


@st.composite
def spliced(draw: st.DrawFn) -> bytes:
    """A real policy with odd bytes put in."""
    text = FILE.read_bytes()
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(text)))
        odd = draw(ODD | st.binary(max_size=4))
        text = text[:at] + odd + text[at + draw(st.integers(0, 20)) :]
    return text


@st.composite
def changed(draw: st.DrawFn) -> bytes:
    """A real policy with some values made others."""
    policy: Any = yaml.safe_load(FILE.read_text())
    for _ in range(draw(st.integers(1, 4))):
        spoil(draw, policy)
    return yaml.safe_dump(policy, allow_unicode=True).encode(errors="surrogatepass")


BOMBS = st.tuples(
    st.sampled_from(["[{0},{0}]", "{{a: {0}, b: {0}}}", "{{<<: [{0},{0}]}}", "[{0},{0},{0},{0}]"]),
    st.integers(1, 60),
    st.sampled_from(["", "cues: {words: *x", "name: *x", "sampling: {t: *x", "<<: *x"]),
).map(lambda made: bomb(*made))


def bomb(level: str, height: int, end: str) -> bytes:
    lines = ["x0: &x0 {k: v}"]
    lines += [f"x{i}: &x{i} {level.format(f'*x{i - 1}')}" for i in range(1, height)]
    return "\n".join([*lines, end.replace("*x", f"*x{height - 1}"), FILE.read_text()]).encode()


def test_any_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"

    def check(content: bytes) -> None:
        path.write_bytes(content)
        started = time.monotonic()
        try:
            usable(read_policy(path))
        except PolicyError as error:
            assert error.problems
            assert all(p.source == str(path) and p.field and p.message for p in error.problems)
            assert len(str(error)) < 100_000
        assert time.monotonic() - started < LONGEST_S

    fuzz(check, spliced() | changed() | BOMBS | st.binary(max_size=200))


def usable(policy: Policy) -> None:
    """What is done with a policy that was taken."""
    policy_warnings(policy, "x")
    assert policy.cue_set
    assert policy.boundary_set
    for sampling in (policy.sampling, policy.large.sampling, policy.small.sampling):
        orjson.dumps(sampling)

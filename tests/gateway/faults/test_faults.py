"""Each fault: what the client sees, what the log tells, what is counted, exactly once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from structlog.testing import capture_logs

from tests.gateway.faults import clients, engines, own
from tests.gateway.faults.play import SCENES, Play
from tests.gateway.faults.rows import ROWS, Row
from tests.gateway.support import Stage

assert clients and engines and own  # whose scenes are found by name


@pytest.fixture
async def play(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Play]:
    with capture_logs() as logs:
        async with AsyncExitStack() as stack:
            yield Play(stage, stack, logs, monkeypatch)


def test_every_row_has_its_scene_and_every_scene_its_row() -> None:
    ids = [row.id for row in ROWS]
    assert sorted(ids) == sorted(SCENES)
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
async def test_a_fault_is_seen_told_and_counted(play: Play, row: Row) -> None:
    assert await SCENES[row.id](play) == row.seen
    await play.settled()
    assert play.told(row) == [], play.logs
    assert await play.counted(row) == row.counted

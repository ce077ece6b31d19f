"""The report's PNG files open, show something, and bear odd evidence."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from gateway.calibrate.report import Evidence, MissingExtraError, write_report
from gateway.calibrate.report.plots import plots
from relaygen.calibration.projection import Speeds
from tests.gateway.calibrate.reporting import by_hand, evidence, statistic


def colours(path: Path) -> int:
    with Image.open(path) as picture:
        picture.load()
        assert picture.format == "PNG" and min(picture.size) > 200
        return len(set(picture.convert("RGB").get_flattened_data()))


def test_the_pictures_of_a_run(tmp_path: Path) -> None:
    paths = plots(evidence(), tmp_path)
    assert [path.name for path in paths] == [
        "cues.png",
        "share.png",
        "speed.png",
        "trace-1.png",
        "trace-2.png",
    ]
    assert all(colours(path) > 20 for path in paths)


@pytest.mark.parametrize(
    "odd",
    [
        by_hand(statistic("Wait", chosen=False)),
        by_hand(statistic("Oh", chosen=False, known=False), statistic("Thus")),
        by_hand(statistic("因此"), texts=["因此", "对", "。", "\U000f0000"]),
        by_hand(statistic("$x_$^{\x1b<"), texts=["$x_$^{\x1b<", "$\\frac$", "."]),
        by_hand(*(statistic(f"word{i}", chosen=i < 3) for i in range(120))),
        replace(by_hand(statistic("Thus")), speeds=Speeds(float("nan"), 1.0)),
        replace(by_hand(), prefixes=()),
    ],
    ids=["none-chosen", "unknown", "cjk", "formula", "many", "no-speed", "nothing"],
)
def test_odd_evidence(odd: Evidence, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(colours(path) > 1 for path in plots(odd, tmp_path))


def test_without_matplotlib_the_page_is_there_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'relaygen\[calibrate\]'"):
        write_report(by_hand(statistic("Thus")), tmp_path)
    assert (tmp_path / "report.html").stat().st_size > 1000

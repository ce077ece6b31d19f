"""Alerts and dashboard: they ask for what the gateway exports, and Prometheus takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from gateway.collectors import Metrics
from tests.deploy.compose import ROOT, services

FOLDER = ROOT / "deploy" / "monitoring"
ALERTS = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
RULES = [rule for group in ALERTS for rule in group["rules"]]
DASHBOARD = json.loads(
    (FOLDER / "grafana" / "dashboards" / "relaygen.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
_NAME = re.compile(r"relaygen_\w+")
_LABELS = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_GROUPED = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_OWN = {"job", "instance", "le"}

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")


def exported() -> dict[str, set[str]]:
    """Labels by the name of each sample."""
    found: dict[str, set[str]] = {}
    for collector in vars(Metrics()).values():
        if isinstance(collector, MetricWrapperBase):
            [family] = collector.describe()
            labels = set(collector._labelnames)
            suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
            for suffix in suffixes.get(family.type, ("",)):
                found[family.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for rule in RULES:
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_an_expression_asks_for_what_is_exported(title: str, expression: str) -> None:
    known = exported()
    names = set(_NAME.findall(expression))
    assert names <= set(known), title
    labels = set(_LABELS.findall(expression)) | {
        label.strip()
        for group in _GROUPED.findall(expression)
        for label in group.split(",")
        if label.strip()
    }
    allowed = _OWN.union(*(known[name] for name in names))
    assert labels <= (allowed | {"policy"} if "relaygen:" in expression else allowed), title


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_a_quantile_keeps_the_buckets(title: str, expression: str) -> None:
    if "histogram_quantile" in expression:
        assert re.search(r"by \([^)]*\ble\b[^)]*\) \(rate\(\w+_bucket", expression), title
    for name in _NAME.findall(expression):
        if name.endswith(("_total", "_bucket", "_sum", "_count")) and "relaygen:" not in name:
            assert re.search(rf"(rate|increase)\({name}", expression), title


def test_everything_that_is_exported_is_in_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in exported()}
    assert [name for name in sorted(families) if name not in shown] == []


def test_panels_are_complete() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alerts_are_complete_and_documented() -> None:
    told = (ROOT / "docs" / "observability.md").read_text(encoding="utf-8")
    for rule in RULES:
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert set(rule["annotations"]) == {"summary", "description"}
            assert f"`{rule['alert']}`" in told


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((FOLDER / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]
    quiet, firing = ({t["alertname"]: t for t in test["alert_rule_test"]} for test in tests)
    alerts = {rule["alert"] for rule in RULES if "alert" in rule}
    assert set(quiet) == set(firing) == alerts
    assert all("exp_alerts" not in test for test in quiet.values())
    assert all(test["exp_alerts"] for test in firing.values())


def test_grafana_finds_what_is_mounted() -> None:
    mounts = dict(mount.split(":")[:2] for mount in services()["grafana"]["volumes"])
    provisioned = FOLDER / "grafana" / "provisioning"
    [provider] = yaml.safe_load((provisioned / "dashboards" / "relaygen.yml").read_text())[
        "providers"
    ]
    assert mounts["./deploy/monitoring/grafana/dashboards"] == provider["options"]["path"]
    [source] = yaml.safe_load((provisioned / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"


# ---- Prometheus' own word -----------------------------------------------------------------------


def promtool(*arguments: str, folder: Path = FOLDER) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_takes_config_and_rules() -> None:
    promtool("check", "config", "prometheus.yml")
    promtool("check", "rules", "alerts.yml")


@needs_promtool
def test_alerts_fire_when_they_should_and_not_else() -> None:
    promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_promtool_takes_the_dashboards_expressions(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {"record": f"panel:{number}", "expr": _filled(target["expr"])}
        for number, target in enumerate(t for panel in PANELS for t in panel["targets"])
    ]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "d", "rules": rules}]}))
    promtool("check", "rules", "rules.yml", folder=tmp_path)


def _filled(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$__range", "1h")

"""deploy/kubernetes: valid for Kubernetes, and its parts fit one another and the gateway."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from gateway.cli import main
from gateway.collectors import Metrics
from gateway.policies import PolicyStore, read_policy
from gateway.reloading import Source
from gateway.settings import Settings, load_settings
from tests.deploy.kubernetes import (
    ENGINE,
    FOLDER,
    OVERLAYS,
    ROOT,
    Object,
    built,
    by_hand,
    by_kubectl,
    container,
    documents,
    files,
    labels,
    matches,
    named,
    of_kind,
    pod,
    ports,
)

FILES = sorted(FOLDER.rglob("*.yaml"))
MANIFESTS = [path for path in FILES if "kind" in documents(path.read_text())[0]]
VERSIONS = ("1.30", kubernetes_validate.latest_version())
OF_OTHERS = {"PodMonitor", "Kustomization"}  # Kubernetes has no schema of them
VLLM_FLAGS = {
    "served-model-name",
    "host",
    "port",
    "tensor-parallel-size",
    "max-model-len",
    "enable-prefix-caching",
    "max-logprobs",
    "enable-prompt-tokens-details",
}

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@pytest.fixture(autouse=True)
def _no_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [key for key in os.environ if key.startswith("RELAYGEN_")]:
        monkeypatch.delenv(key)


def settings(overlay: str, folder: Path) -> Settings:
    return load_settings({}, files(overlay, "relaygen-config", folder) / "gateway.yaml")


# ---- Kubernetes' view --------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(FOLDER)))
def test_every_manifest_fits_the_schema(path: Path, version: str) -> None:
    for manifest in documents(path.read_text()):
        _validate(manifest, version)


@pytest.mark.parametrize("version", VERSIONS)
@each_overlay
def test_what_is_built_fits_the_schema(overlay: str, version: str) -> None:
    names = [(o["kind"], o["metadata"]["name"]) for o in built(overlay)]
    assert len(names) == len(set(names))
    for manifest in built(overlay):
        _validate(manifest, version)


def _validate(manifest: Object, version: str) -> None:
    if manifest["kind"] not in OF_OTHERS:
        kubernetes_validate.validate(manifest, version, strict=True)


@each_overlay
def test_without_kubectl_the_same_is_read(overlay: str) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here")
    folder = FOLDER / "overlays" / overlay
    assert _comparable(by_hand(folder)) == _comparable(by_kubectl(folder))


def _comparable(found: list[Object]) -> list[Object]:
    """Without what kustomize alone adds: tags of images, labels of generated ConfigMaps."""
    bare = yaml.safe_load(re.sub(r"(image: [\w./-]+):\S+", r"\1", yaml.safe_dump(found)))
    for manifest in bare:
        if manifest["kind"] == "ConfigMap":
            manifest["metadata"] = {"name": manifest["metadata"]["name"]}
    return sorted(bare, key=lambda o: (o["kind"], o["metadata"]["name"]))


def test_all_files_are_used() -> None:
    named_somewhere = "".join(path.read_text() for path in FOLDER.rglob("kustomization.yaml"))
    loose = {"kustomization.yaml", "prometheus-adapter-values.yaml"}
    for path in FILES:
        assert path.name in loose or path.name in named_somewhere, path


@each_overlay
def test_images_have_versions(overlay: str) -> None:
    if not shutil.which("kubectl"):
        pytest.skip("no kubectl here")
    for workload in of_kind(overlay, "Deployment"):
        assert re.search(r":v?\d", container(workload)["image"])


# ---- the gateway's view ------------------------------------------------------------------------


@each_overlay
def test_settings_are_taken_and_their_ports_are_the_pods(overlay: str, tmp_path: Path) -> None:
    found = settings(overlay, tmp_path)
    gateway = named(overlay, "Deployment")
    assert ports(gateway) == {"http": found.port, "admin": found.admin.port}
    assert found.host == found.admin.host == "0.0.0.0"
    assert found.tls.cert is None
    mounts = _mounts(gateway)
    assert mounts[str(found.policies)] == {"configMap": {"name": "relaygen-policies"}}
    config = Path(container(gateway)["args"][-1])
    assert mounts[str(config.parent)] == {"configMap": {"name": "relaygen-config"}}
    assert config.name in named(overlay, "ConfigMap", "relaygen-config")["data"]


def _mounts(workload: Object) -> dict[str, Object]:
    """Volumes by where they are."""
    volumes = {v["name"]: {k: v[k] for k in v if k != "name"} for v in pod(workload)["volumes"]}
    mounts = container(workload)["volumeMounts"]
    assert not any("subPath" in mount for mount in mounts)
    return {mount["mountPath"]: volumes[mount["name"]] for mount in mounts}


@each_overlay
def test_arguments_are_the_command_lines(overlay: str, tmp_path: Path, capsys: Any) -> None:
    config = files(overlay, "relaygen-config", tmp_path) / "gateway.yaml"
    command = container(named(overlay, "Deployment"))["args"]
    assert main([*command[:-1], str(config), "--print-settings"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["port"] == 8080


def test_the_overlays_differ_in_their_engines_alone() -> None:
    one, other = (yaml.safe_load(_gateway_yaml(overlay)) for overlay in OVERLAYS)
    assert one.pop("backends") != other.pop("backends")
    assert one == other


def _gateway_yaml(overlay: str) -> str:
    text: str = named(overlay, "ConfigMap", "relaygen-config")["data"]["gateway.yaml"]
    return text


@each_overlay
def test_keys_of_a_secret_join_the_settings(
    overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"api-keys": '[{"name": "alice", "key": "sk-1"}]', "large": "a", "small": "b"}
    for entry in container(named(overlay, "Deployment"))["env"]:
        secret = entry["valueFrom"]["secretKeyRef"]
        assert secret["optional"] is True
        monkeypatch.setenv(entry["name"], values.pop(secret["key"]))
    assert not values
    found = settings(overlay, tmp_path)
    assert [key.name for key in found.api_keys] == ["alice"]
    for backend, key in zip(("large", "small"), "ab", strict=True):
        given = found.backends[backend].api_key
        assert given is not None and given.get_secret_value() == key
        assert found.backends[backend].urls


@each_overlay
def test_policies_are_valid_and_find_their_backends(overlay: str, tmp_path: Path) -> None:
    folder = files(overlay, "relaygen-policies", tmp_path / "policies")
    paths = sorted(folder.glob("*.yaml"))
    assert paths
    assert main(["policy", "check", *map(str, paths)]) == 0
    backends = settings(overlay, tmp_path / "config").backends
    for policy in map(read_policy, paths):
        assert {policy.large.backend, policy.small.backend} <= backends.keys()


@each_overlay
def test_policies_are_copies(overlay: str) -> None:
    originals = {path.read_text() for path in (ROOT / "policies").glob("*.yaml")}
    for text in named(overlay, "ConfigMap", "relaygen-policies")["data"].values():
        assert text in originals, "deploy/kubernetes/base/policies differs from policies"


def test_a_changed_config_map_is_seen(tmp_path: Path) -> None:
    """The kubelet writes a new folder and swaps one link."""
    folder = files("vllm", "relaygen-policies", tmp_path / "policies")
    config = files("vllm", "relaygen-config", tmp_path / "config")
    store = PolicyStore(folder)
    source = Source({}, config / "gateway.yaml")
    store.load()
    source.read()
    assert list(store.by_name) == ["qwen3-32b+qwen3-1.7b"] and not source.changed
    _swap(folder, "name: qwen3-32b", "name: other-32b")
    _swap(config, "generations: 512", "generations: 100")
    store.load()
    assert list(store.by_name) == ["other-32b+qwen3-1.7b"] and not store.problems
    assert source.changed
    assert source.read().limits.generations == 100


def _swap(folder: Path, old: str, new: str) -> None:
    (folder / "..2").mkdir()
    for path in (folder / "..1").iterdir():
        (folder / "..2" / path.name).write_text(path.read_text().replace(old, new))
    (folder / "..next").symlink_to("..2")
    (folder / "..next").replace(folder / "..data")
    shutil.rmtree(folder / "..1")


# ---- how parts fit one another -----------------------------------------------------------------


@each_overlay
def test_a_pod_is_given_the_time_to_drain(overlay: str, tmp_path: Path) -> None:
    gateway = named(overlay, "Deployment")
    sleep = container(gateway)["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = settings(overlay, tmp_path).timeouts.drain
    assert pod(gateway)["terminationGracePeriodSeconds"] > sleep + drain


@each_overlay
def test_probes_ask_what_is_there(overlay: str) -> None:
    for workload in of_kind(overlay, "Deployment"):
        for name in _probes(workload):
            assert container(workload)[name]["httpGet"]["port"] in ports(workload)
    gateway = container(named(overlay, "Deployment"))
    assert gateway["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    assert gateway["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "admin"}


def _probes(workload: Object) -> list[str]:
    found = [key for key in container(workload) if key.endswith("Probe")]
    assert "readinessProbe" in found
    return found


@each_overlay
def test_selectors_match_exactly_one_workload(overlay: str) -> None:
    workloads = of_kind(overlay, "Deployment")
    for workload in workloads:
        selector = workload["spec"]["selector"]["matchLabels"]
        assert [w for w in workloads if matches(selector, labels(w))] == [workload]
    for service in of_kind(overlay, "Service"):
        (workload,) = (w for w in workloads if matches(service["spec"]["selector"], labels(w)))
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports(workload).keys()
    gateway = labels(named(overlay, "Deployment"))
    for kind in ("PodDisruptionBudget", "PodMonitor"):
        assert matches(named(overlay, kind)["spec"]["selector"]["matchLabels"], gateway)
    spec = pod(named(overlay, "Deployment"))
    for spread in spec["topologySpreadConstraints"]:
        assert matches(spread["labelSelector"]["matchLabels"], gateway)
    assert spec["serviceAccountName"] == named(overlay, "ServiceAccount")["metadata"]["name"]


@each_overlay
def test_variables_of_services_are_kept_out(overlay: str) -> None:
    """A Service `relaygen` would set RELAYGEN_PORT=tcp://..., one `vllm-...` VLLM_..."""
    for workload in of_kind(overlay, "Deployment"):
        assert pod(workload)["enableServiceLinks"] is False


@each_overlay
def test_the_gateway_may_do_nothing_but_serve(overlay: str) -> None:
    gateway = named(overlay, "Deployment")
    whole, own = pod(gateway)["securityContext"], container(gateway)["securityContext"]
    user = re.search(r"^USER (\d+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert user and whole["runAsUser"] == int(user[1]) and whole["runAsNonRoot"] is True
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own["readOnlyRootFilesystem"] is True and own["allowPrivilegeEscalation"] is False
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert "emptyDir" in _mounts(gateway)["/tmp"]
    assert pod(gateway)["automountServiceAccountToken"] is False
    assert named(overlay, "ServiceAccount")["automountServiceAccountToken"] is False


@each_overlay
def test_the_network_lets_the_gateway_reach_its_engines(overlay: str, tmp_path: Path) -> None:
    rules = list(_egress(overlay))
    for backend in settings(overlay, tmp_path).backends.values():
        for url in map(urlsplit, backend.urls):
            host = url.hostname or ""
            assert any(
                _leads_to(overlay, rule, host) and _open(rule, url.port or 80) for rule in rules
            ), f"nothing leads to {host}:{url.port}"
    assert any(_open(rule, 53, "UDP") and _open(rule, 53) for rule in rules), "no DNS"


def _egress(overlay: str) -> Iterator[Object]:
    gateway = labels(named(overlay, "Deployment"))
    for policy in of_kind(overlay, "NetworkPolicy"):
        if matches(policy["spec"]["podSelector"]["matchLabels"], gateway):
            yield from policy["spec"].get("egress", [])


def _open(rule: Object, port: int, protocol: str = "TCP") -> bool:
    return {"protocol": protocol, "port": port} in rule["ports"]


def _leads_to(overlay: str, rule: Object, host: str) -> bool:
    service, _, rest = host.partition(".")
    for to in rule.get("to", []):
        if rest:  # SERVICE.NAMESPACE.svc.cluster.local
            (expression,) = to["namespaceSelector"]["matchExpressions"]
            found = rest.partition(".")[0] in expression["values"]
        else:
            selector = named(overlay, "Service", service)["spec"]["selector"]
            found = matches(to["podSelector"]["matchLabels"], selector)
        if found:
            return True
    return False


@each_overlay
def test_the_network_lets_clients_and_prometheus_in(overlay: str) -> None:
    gateway = named(overlay, "Deployment")
    ingress = named(overlay, "NetworkPolicy")["spec"]["ingress"]
    by_port = {rule["ports"][0]["port"]: rule["from"] for rule in ingress}
    assert by_port.keys() == set(ports(gateway).values())
    (prometheus,) = by_port[ports(gateway)["admin"]]
    assert prometheus["namespaceSelector"]["matchLabels"], "/readyz is open to everybody"


@each_overlay
def test_the_autoscaler_goes_by_a_metric_of_the_gateway(overlay: str) -> None:
    spec = named(overlay, "HorizontalPodAutoscaler")["spec"]
    target = named(overlay, spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    assert "replicas" not in target["spec"], "an apply would undo what the autoscaler did"
    (metric,) = spec["metrics"]
    name = metric["pods"]["metric"]["name"]
    assert name in {family.name for family in Metrics().registry.collect()}
    text = (FOLDER / "prometheus-adapter-values.yaml").read_text()
    (rule,) = yaml.safe_load(text)["rules"]["custom"]
    assert rule["seriesQuery"].partition("{")[0] == name
    assert rule["resources"]["overrides"].keys() == {"namespace", "pod"}
    limit = yaml.safe_load(_gateway_yaml(overlay))["limits"]["generations"]
    assert int(metric["pods"]["target"]["averageValue"]) < limit


@each_overlay
def test_prometheus_asks_the_admin_port(overlay: str) -> None:
    monitor = named(overlay, "PodMonitor")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "admin", "path": "/metrics", "interval": "15s"}
    assert endpoint["port"] in ports(named(overlay, "Deployment"))


# ---- vLLM --------------------------------------------------------------------------------------

each_engine = pytest.mark.parametrize("name", ["vllm-large", "vllm-small"])


def _engines() -> list[Object]:
    return [w for w in of_kind("vllm", "Deployment") if matches(ENGINE, labels(w))]


@each_engine
def test_vllm_is_started_for_a_relay(name: str) -> None:
    engine = named("vllm", "Deployment", name)
    assert container(engine)["command"] == ["vllm", "serve"]
    model, flags = _arguments(engine)
    assert flags.keys() == VLLM_FLAGS
    assert flags["served-model-name"] == model
    assert flags["max-logprobs"] == "20"
    assert ports(engine) == {"http": int(flags["port"])}
    gpus = container(engine)["resources"]["limits"]["nvidia.com/gpu"]
    assert gpus == flags["tensor-parallel-size"]


def _arguments(engine: Object) -> tuple[str, dict[str, str]]:
    model, *rest = container(engine)["args"]
    return model, {a[2:].partition("=")[0]: a.partition("=")[2] for a in rest}


@each_engine
def test_vllm_has_room_and_time(name: str) -> None:
    engine = named("vllm", "Deployment", name)
    mounts = _mounts(engine)
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    claim = mounts["/cache"]["persistentVolumeClaim"]["claimName"]
    assert named("vllm", "PersistentVolumeClaim", claim)
    env = {entry["name"]: entry for entry in container(engine)["env"]}
    assert env["HF_HOME"]["value"].startswith("/cache/")
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True
    probe = container(engine)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600
    for probe_name in _probes(engine):
        assert container(engine)[probe_name]["httpGet"]["path"] == "/health"


def test_vllm_serves_the_policys_models(tmp_path: Path) -> None:
    backends = settings("vllm", tmp_path / "config").backends
    folder = files("vllm", "relaygen-policies", tmp_path / "policies")
    for policy in map(read_policy, folder.glob("*.yaml")):
        for side in (policy.large, policy.small):
            (url,) = backends[side.backend].urls
            assert _model_at(url) == side.model


def _model_at(url: str) -> str:
    selector = named("vllm", "Service", str(urlsplit(url).hostname))["spec"]["selector"]
    (engine,) = (e for e in _engines() if matches(selector, labels(e)))
    return _arguments(engine)[0]


def test_only_the_gateway_reaches_vllm() -> None:
    (rule,) = named("vllm", "NetworkPolicy", "vllm")["spec"]["ingress"]
    (source,) = rule["from"]
    assert matches(source["podSelector"]["matchLabels"], labels(named("vllm", "Deployment")))
    assert all(_open(rule, port) for engine in _engines() for port in ports(engine).values())
    selector = named("vllm", "NetworkPolicy", "vllm")["spec"]["podSelector"]["matchLabels"]
    assert all(matches(selector, labels(engine)) for engine in _engines())
    assert not matches(selector, labels(named("vllm", "Deployment")))

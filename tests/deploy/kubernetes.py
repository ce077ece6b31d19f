"""What kustomize makes of deploy/kubernetes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("vllm", "existing")
ENGINE = {"app.kubernetes.io/component": "engine"}

Object = dict[str, Any]


@cache
def built(overlay: str) -> tuple[Object, ...]:
    """All objects of an overlay, by kubectl if there is one."""
    folder = FOLDER / "overlays" / overlay
    return tuple(by_kubectl(folder) if shutil.which("kubectl") else by_hand(folder))


def by_kubectl(folder: Path) -> list[Object]:
    command = ["kubectl", "kustomize", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return documents(ran.stdout)


def by_hand(folder: Path) -> list[Object]:
    """As much of kustomize as these overlays need, but for `images`."""
    found = {(o["kind"], o["metadata"]["name"]): o for o in _read(folder)}
    return list(found.values())


def _read(folder: Path) -> Iterator[Object]:
    (kustomization,) = documents((folder / "kustomization.yaml").read_text())
    for name in kustomization["resources"]:
        path = folder / name
        yield from _read(path) if path.is_dir() else documents(path.read_text())
    for made in kustomization.get("configMapGenerator", []):
        data = {Path(file).name: (folder / file).read_text() for file in made["files"]}
        yield {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": made["name"]},
            "data": data,
        }


def documents(text: str) -> list[Object]:
    return [found for found in yaml.safe_load_all(text) if found]


def of_kind(overlay: str, kind: str) -> list[Object]:
    return [found for found in built(overlay) if found["kind"] == kind]


def named(overlay: str, kind: str, name: str = "relaygen") -> Object:
    (found,) = (o for o in of_kind(overlay, kind) if o["metadata"]["name"] == name)
    return found


def pod(workload: Object) -> Object:
    spec: Object = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Object) -> Object:
    (found,) = pod(workload)["containers"]
    return dict(found)


def labels(workload: Object) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def matches(selector: Object, pods: dict[str, str]) -> bool:
    return selector.items() <= pods.items()


def ports(workload: Object) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(workload)["ports"]}


def files(overlay: str, config_map: str, folder: Path) -> Path:
    """The files of a ConfigMap, as a pod has them: links by way of one that is swapped."""
    version = folder / "..1"
    version.mkdir(parents=True)
    (folder / "..data").symlink_to("..1")
    for name, text in named(overlay, "ConfigMap", config_map)["data"].items():
        (version / name).write_text(text)
        (folder / name).symlink_to(f"..data/{name}")
    return folder

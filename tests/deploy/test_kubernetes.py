"""The manifests, as kustomize builds them: valid for Kubernetes, and consistent among themselves and with the services."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.test_compose import PARSERS, entrypoint

FOLDER = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (FOLDER / "components").iterdir())
# Each alone, all at once, and all in the other order: a patch that wants what another makes, or undoes it, shows.
SUBSETS = [*((name,) for name in COMPONENTS), tuple(COMPONENTS), tuple(reversed(COMPONENTS))]

Manifest = dict[str, Any]


def build(folder: Path) -> list[Manifest]:
    kubectl = Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def combine(components: Sequence[str], folder: Path) -> Path:
    """The base with these components, as an overlay below ``folder``."""
    # kustomize takes no absolute paths, and nothing from outside the folder's file system root.
    (folder / "overlay").mkdir()
    (folder / "k8s").symlink_to(FOLDER)
    names = "".join(f"\n  - {Path('../k8s/components') / name}" for name in components)
    (folder / "overlay" / "kustomization.yaml").write_text(
        f"apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [../k8s/base]\ncomponents:{names}\n"
    )
    return folder / "overlay"


def validate(manifests: list[Manifest], folder: Path) -> None:
    path = folder / "built.yaml"
    path.write_text(yaml.safe_dump_all(manifests))
    argv = [sys.executable, "-m", "kubernetes_validate", "--strict", "--quiet", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> list[Manifest]:
    return build(FOLDER / "overlays" / request.param)


def workloads(manifests: list[Manifest]) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] in ("Deployment", "StatefulSet")}


def containers(workload: Manifest) -> list[Manifest]:
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_it_is_valid(overlay: list[Manifest], tmp_path: Path) -> None:
    validate(overlay, tmp_path)


@pytest.mark.parametrize("components", SUBSETS, ids="+".join)
def test_components_combine(components: tuple[str, ...], tmp_path: Path) -> None:
    validate(build(combine(components, tmp_path)), tmp_path)


def test_a_wrong_manifest_is_found(tmp_path: Path) -> None:
    manifests = build(FOLDER / "overlays" / OVERLAYS[0])
    workloads(manifests)["gateway"]["spec"]["replica"] = 2
    with pytest.raises(AssertionError, match="replica"):
        validate(manifests, tmp_path)


def test_each_command_line_is_one_that_the_service_takes(overlay: list[Manifest]) -> None:
    images = {
        container["image"].removeprefix("kvern/"): container
        for workload in workloads(overlay).values()
        for container in workload["spec"]["template"]["spec"]["containers"]
    }
    assert set(images) == {*PARSERS, "redis:7-bookworm"}
    for target, parse in PARSERS.items():
        _, *flags = entrypoint(target)
        parse([*flags, *(word.replace("$(POD)", "scheduler-0") for word in images[target]["args"])])


def test_services_reach_pods_and_probes_name_their_ports(overlay: list[Manifest]) -> None:
    pods = [workload["spec"]["template"] for workload in workloads(overlay).values()]
    for service in (m for m in overlay if m["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        (pod,) = [pod for pod in pods if selector <= pod["metadata"]["labels"].items()]
        named = {port["name"] for c in pod["spec"]["containers"] for port in c["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= named
    for pod in pods:
        for container in pod["spec"]["containers"]:
            numbers = {port["containerPort"] for port in container["ports"]}
            probes = [container.get(f"{kind}Probe", {}) for kind in ("startup", "liveness", "readiness")]
            assert {probe["grpc"]["port"] for probe in probes if "grpc" in probe} <= numbers


def test_policies_select_pods(overlay: list[Manifest]) -> None:
    labels = [
        workload["spec"]["template"]["metadata"]["labels"].items() for workload in workloads(overlay).values()
    ]
    for policy in (m for m in overlay if m["kind"] == "NetworkPolicy"):
        assert any(policy["spec"]["podSelector"]["matchLabels"].items() <= pod for pod in labels)


def test_pods_meet_the_restricted_standard(overlay: list[Manifest]) -> None:
    for name, workload in workloads(overlay).items():
        pod = workload["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in containers(workload):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name


def test_a_gateway_is_given_the_time_it_takes_to_drain(overlay: list[Manifest]) -> None:
    pod = workloads(overlay)["gateway"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (grace,) = [int(word.split("=")[1]) for word in container["args"] if word.startswith("--shutdown-grace")]
    assert (
        container["lifecycle"]["preStop"]["sleep"]["seconds"] + grace < pod["terminationGracePeriodSeconds"]
    )

"""Resources that are not Kubernetes' own (KEDA, Istio, Gateway API and its Inference Extension): valid by their projects' schemas."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
from deploy.test_kubernetes import COMPONENTS, Manifest, build, combine

SCRIPT = Path(__file__).with_name("validate_crds.mjs")
PACKAGES = [f"@kubernetes-models/{name}" for name in ("keda@2.0.0", "istio@3.0.1", "gateway-api@2.0.0")]
POOL = {
    # inference.networking.k8s.io/v1, from the project's reference page: what is required, and nothing unknown.
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {"required": ["matchLabels"], "properties": {"matchLabels": {"type": "object", "minProperties": 1}}},
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {"required": ["number"], "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}}},
        },
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "port"],
            "properties": {
                "group": {"type": "string"},
                "kind": {"type": "string"},
                "name": {"type": "string", "minLength": 1},
                "port": {"required": ["number"]},
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}  # fmt: skip


def custom(manifests: list[Manifest]) -> list[Manifest]:
    groups = ("keda.sh", "istio.io", "gateway.networking.k8s.io")
    return [m for m in manifests if m["apiVersion"].split("/")[0].endswith(groups)]


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    return build(combine(COMPONENTS, tmp_path_factory.mktemp("everything")))


@pytest.mark.slow
def test_they_are_valid(everything: list[Manifest], tmp_path: Path) -> None:
    install = ["npm", "install", "--no-save", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(install, cwd=tmp_path, check=True, capture_output=True, timeout=240)
    script = tmp_path / SCRIPT.name
    script.write_text(SCRIPT.read_text())

    def complaints(manifests: list[Manifest]) -> str:
        done = subprocess.run(
            ["node", script],
            input=json.dumps(manifests),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    found = custom(everything)
    assert {m["kind"] for m in found} == {
        *("ScaledObject", "PeerAuthentication", "DestinationRule", "HTTPRoute", "GRPCRoute"),
    }
    assert complaints(found) == ""
    (scaled,) = [m for m in found if m["kind"] == "ScaledObject"]
    wrong = {**scaled, "spec": {**scaled["spec"], "maxReplicaCount": "four"}}
    assert "ScaledObject worker" in complaints([wrong])


def test_the_pool_is_valid(everything: list[Manifest]) -> None:
    (pool,) = [m for m in everything if m["kind"] == "InferencePool"]
    assert pool["apiVersion"] == "inference.networking.k8s.io/v1"
    jsonschema.validate(pool["spec"], POOL)
    labels = [
        m["spec"]["template"]["metadata"]["labels"].items() for m in everything if m["kind"] == "Deployment"
    ]
    assert any(pool["spec"]["selector"]["matchLabels"].items() <= pod for pod in labels)


def test_the_scaled_workers_are_known_to_the_scheduler(everything: list[Manifest]) -> None:
    """As many as the autoscalers may start, and what they ask Prometheus for is a metric that the scheduler has."""
    (scheduler,) = [
        m for m in everything if m["kind"] == "StatefulSet" and m["metadata"]["name"] == "scheduler"
    ]
    args = scheduler["spec"]["template"]["spec"]["containers"][0]["args"]
    workers = {word for word in args if word.startswith("--worker=")}
    (scaled,) = [m for m in everything if m["kind"] == "ScaledObject"]
    (own,) = [
        m for m in everything if m["kind"] == "HorizontalPodAutoscaler" and m["metadata"]["name"] == "worker"
    ]
    assert len(workers) == scaled["spec"]["maxReplicaCount"] == own["spec"]["maxReplicas"]
    source = (Path(__file__).parents[2] / "scheduler" / "kvern_scheduler" / "metrics.py").read_text()
    assert "sum(kvern_pending_tokens)" in scaled["spec"]["triggers"][0]["metadata"]["query"]
    assert "kvern_pending_tokens" in source

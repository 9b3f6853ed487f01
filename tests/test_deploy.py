"""The files in `deploy/` fit their schemas, hold to the house's rules for pods, and configure us.

Both schemas come with packages, so no network is needed: `kubernetes-validate` carries those of
Kubernetes, `check-jsonschema` that of compose files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sources import ROOT
from trinamo.runtime.config import Config, load_config
from trinamo.runtime.config_source import read_yaml

DEPLOY = ROOT / "deploy"
KUBERNETES = "1.30"
COMPOSE = DEPLOY / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?][^}]*)?\}")

Thing = dict[str, Any]


def manifests() -> list[tuple[str, Thing]]:
    return [
        (f"{path.name}: {document['kind']} {document['metadata']['name']}", document)
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text("utf-8"))
    ]


def workloads() -> list[tuple[str, Thing]]:
    """The pods of every controller, with the controller's name."""
    return [
        (name, document["spec"]["template"])
        for name, document in manifests()
        if document["kind"] in ("Deployment", "StatefulSet")
    ]


def named(things: list[tuple[str, Thing]]) -> list[Any]:
    return [pytest.param(thing, id=name) for name, thing in things]


def compose() -> Thing:
    loaded: Thing = yaml.safe_load(COMPOSE.read_text("utf-8"))
    return loaded


@pytest.mark.parametrize("document", named(manifests()))
def test_every_manifest_fits_the_schema_of_kubernetes(document: Thing) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")

    kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.slow
def test_the_compose_file_fits_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas")

    jsonschema.validate(compose(), schemas.get_builtin_schema("vendor.compose-spec"))


def test_a_wrong_manifest_is_found() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    document = dict(manifests()[0][1], dat={})

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("template", named(workloads()))
def test_every_pod_is_confined_bounded_and_probed(template: Thing) -> None:
    pod = template["spec"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["automountServiceAccountToken"] is False
    # Service variables such as TRINAMO_FRONTEND_PORT would be taken for keys of ours.
    assert pod["enableServiceLinks"] is False
    for container in pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
        assert container["readinessProbe"]["httpGet"]["path"] != ""
        assert container["livenessProbe"]["httpGet"]["path"] != ""
        assert ":latest" not in container["image"]
        ports = {port["name"] for port in container["ports"]}
        assert container["readinessProbe"]["httpGet"]["port"] in ports
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} <= mounted


def test_our_pods_are_asked_whether_they_live_and_whether_they_serve() -> None:
    ours = [
        container
        for _, template in workloads()
        for container in template["spec"]["containers"]
        if container["image"].startswith("trinamo:")
    ]

    assert len(ours) == 2
    for container in ours:
        assert container["livenessProbe"]["httpGet"]["path"] == "/live"
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"


def test_every_workload_has_a_disruption_budget_that_selects_it() -> None:
    selected = {
        document["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"]
        for _, document in manifests()
        if document["kind"] == "PodDisruptionBudget"
    }

    assert selected == {
        template["metadata"]["labels"]["app.kubernetes.io/name"] for _, template in workloads()
    }


def strings(thing: Any) -> Iterator[tuple[str, str]]:
    """Every text in a manifest, with the key it stands under."""
    if isinstance(thing, dict):
        for key, value in thing.items():
            if isinstance(value, str):
                yield str(key), value
            else:
                yield from strings(value)
    elif isinstance(thing, list):
        for value in thing:
            yield from strings(value)


def test_secrets_are_named_and_never_written_down() -> None:
    documents = [document for _, document in manifests()]
    kinds = {document["kind"] for document in documents}
    variables = {
        entry["name"]: entry
        for _, template in workloads()
        for container in template["spec"]["containers"]
        for entry in container.get("env", [])
    }

    assert "Secret" not in kinds
    assert "secretKeyRef" in variables["TRINAMO_EVENT_PLANE__NATS__TOKEN"]["valueFrom"]
    assert "secretKeyRef" in variables["NATS_TOKEN"]["valueFrom"]
    assert "PRIVATE KEY" not in "".join(text for each in documents for _, text in strings(each))


def test_the_configuration_in_the_manifests_is_one(tmp_path: Path) -> None:
    document = next(d for name, d in manifests() if name.startswith("config.yaml"))
    text = document["data"]["trinamo.yaml"]
    path = tmp_path / "trinamo.yaml"
    path.write_text(text)
    variables = {
        entry["name"]: "1.2.3.4"
        for _, template in workloads()
        for container in template["spec"]["containers"]
        for entry in container.get("env", [])
        if entry["name"].startswith("TRINAMO_")
    }

    read_yaml(Config, text, "deploy/kubernetes/config.yaml")
    config = load_config(path, environ=variables)
    # A list of names would be looked up once, and a pod that moves has another address.
    assert config.control_plane.etcd.endpoints == ("etcd:2379",)
    assert config.data_plane.tcp.advertise_host == "1.2.3.4"
    ports = {
        port["containerPort"]
        for _, template in workloads()
        for container in template["spec"]["containers"]
        if container["image"].startswith("trinamo:")
        for port in container["ports"]
    }
    assert ports == {config.http.port, config.worker.status_port}


def test_the_services_of_the_compose_file_are_configured_and_confined() -> None:
    services = compose()["services"]

    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["user"].split(":")[0] != "0"
        assert "healthcheck" in service
        assert "memory" in service["deploy"]["resources"]["limits"]
    for name in ("worker-1", "worker-2", "frontend"):
        environ = {
            key: VARIABLE.sub("text", value) for key, value in services[name]["environment"].items()
        }
        config = load_config(environ=environ)
        assert config.data_plane.tcp.advertise_host == name
        assert config.data_plane.tcp.host == "0.0.0.0"


def test_the_image_runs_as_nobody_of_importance() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]

    assert users == ["10001"]
    assert 'ENTRYPOINT ["trinamo"]' in lines

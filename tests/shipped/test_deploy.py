"""The files in `deploy/` fit their schemas, hold to the house's rules for pods, and configure us.

Both schemas come with packages, so no network is needed: `kubernetes-validate` carries those of
Kubernetes, `check-jsonschema` that of compose files.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.certificates import Authority
from tests.shipped.kustomize import of_kubernetes
from tests.sources import ROOT
from trinamo.cli.children.shared_port import frontend_grace_s
from trinamo.runtime.config.config import config_notices, load_config
from trinamo.runtime.process.frontend.dashboard import dashboard_url
from trinamo.transports.servers.binaries import find_nats_server

DEPLOY = ROOT / "deploy"
KUBERNETES = "1.30"
COMPOSE = DEPLOY / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?][^}]*)?\}")

Thing = dict[str, Any]


def manifests() -> list[tuple[str, Thing]]:
    return [
        (
            f"{path.parent.name}/{path.name}: {document['kind']} {document['metadata']['name']}",
            document,
        )
        for path in sorted((DEPLOY / "kubernetes").glob("*/*.yaml"))
        if path.name != "kustomization.yaml"
        for document in yaml.safe_load_all(path.read_text("utf-8"))
    ]


def workloads() -> list[tuple[str, Thing]]:
    """The pods of every controller, with the controller's name."""
    return [
        (name, document["spec"]["template"])
        for name, document in manifests()
        if document["kind"] in ("Deployment", "StatefulSet")
    ]


SIZES = {"small": 1, "medium": 3, "large": 5}
"""How many etcd members and NATS servers each size of `deploy/kubernetes` has."""


def manifest(start: str) -> Thing:
    """The first whose name starts so, such as `large/nats.yaml: ConfigMap`."""
    return next(document for name, document in manifests() if name.startswith(start))


def named(things: list[tuple[str, Thing]]) -> list[Any]:
    return [pytest.param(thing, id=name) for name, thing in things]


def compose() -> Thing:
    loaded: Thing = yaml.safe_load(COMPOSE.read_text("utf-8"))
    return loaded


@pytest.mark.parametrize(
    "document", named([each for each in manifests() if of_kubernetes(each[1])])
)
def test_every_manifest_fits_the_schema_of_kubernetes(document: Thing) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_compose_file_fits_its_schema() -> None:
    import jsonschema
    from check_jsonschema import builtin_schemas as schemas

    jsonschema.validate(compose(), schemas.get_builtin_schema("vendor.compose-spec"))


def test_a_wrong_manifest_is_found() -> None:
    import kubernetes_validate

    document = dict(manifest("small/config.yaml"), dat={})

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


@pytest.mark.parametrize("size", SIZES)
def test_the_configuration_in_the_manifests_is_one(tmp_path: Path, size: str) -> None:
    text = manifest(f"{size}/config.yaml")["data"]["trinamo.yaml"]
    path = tmp_path / "trinamo.yaml"
    path.write_text(text)
    variables = {
        entry["name"]: "1.2.3.4"
        for _, template in workloads()
        for container in template["spec"]["containers"]
        for entry in container.get("env", [])
        if entry["name"].startswith("TRINAMO_")
    }

    config = load_config(path, environ=variables)

    etcd, nats = config.control_plane.etcd, config.event_plane.nats
    # A list of names would be looked up once, and a pod that moves has another address.
    assert etcd.endpoints == ("etcd:2379",)
    assert len(nats.servers) == nats.nodes == etcd.nodes == SIZES[size]
    assert etcd.tls.enabled
    assert nats.tls.enabled
    assert config_notices(config) == []
    assert config.data_plane.tcp.advertise_host == "1.2.3.4"
    ports = {
        port["containerPort"]
        for _, template in workloads()
        for container in template["spec"]["containers"]
        if container["image"].startswith("trinamo:")
        for port in container["ports"]
    }
    assert ports == {config.http.port, config.http.status_port, config.worker.status_port}
    # Every machine's operator finds the dashboard there, which asks for no key.
    assert dashboard_url(config.http, "", "http://pod:9090") == "http://pod:9090/dashboard"
    patches = yaml.safe_load((DEPLOY / "kubernetes/scraped/kustomization.yaml").read_text())[
        "patches"
    ]
    assert f'prometheus.io/port: "{config.http.status_port}"' in patches[0]["patch"]


@pytest.mark.parametrize("size", SIZES)
def test_every_file_that_the_configuration_names_is_mounted(size: str) -> None:
    text = manifest(f"{size}/config.yaml")["data"]["trinamo.yaml"]
    wanted = set(re.findall(r"_file: (/\S+)/[^/]+\n", text))

    assert "/etc/trinamo-secret" in wanted
    for role in ("frontend", "worker"):
        pod = manifest(f"common/{role}.yaml: Deployment")["spec"]["template"]["spec"]
        mounts = pod["containers"][0]["volumeMounts"]
        assert wanted <= {mount["mountPath"] for mount in mounts}


@pytest.mark.parametrize("size", SIZES)
def test_as_many_servers_run_as_know_of_each_other(size: str) -> None:
    count = SIZES[size]
    etcd, nats = (manifest(f"{size}/{name}.yaml: StatefulSet")["spec"] for name in ("etcd", "nats"))
    flags = etcd["template"]["spec"]["containers"][0]["command"]
    peers = next(flag for flag in flags if flag.startswith("--initial-cluster="))
    settings = manifest(f"{size}/nats.yaml: ConfigMap")["data"]["nats.conf"]

    assert etcd["replicas"] == nats["replicas"] == count
    assert re.findall(r"etcd-(\d)=https://etcd-\1.etcd:2380", peers) == [*map(str, range(count))]
    routes = re.findall(r"nats-route://nats-(\d).nats:6222", settings)
    assert routes == ([*map(str, range(count))] if count > 1 else [])


def test_the_sizes_differ_in_their_numbers_alone() -> None:
    """What is mended in one must be mended in the other."""

    def shape(thing: Any) -> Any:
        if isinstance(thing, dict):
            return {key: shape(value) for key, value in thing.items() if key != "data"}
        if isinstance(thing, list):
            return [shape(value) for value in thing]
        return None if isinstance(thing, int) else re.sub(r"[\d,.]+\S*", "", str(thing))

    of_size = {
        size: {name.partition("/")[2]: shape(each) for name, each in manifests() if size in name}
        for size in SIZES
    }
    assert of_size["small"] == of_size["medium"] == of_size["large"]


@pytest.mark.parametrize("size", SIZES)
def test_nats_takes_its_configuration(size: str, tmp_path: Path) -> None:
    """The server itself reads it, certificates included."""
    certificate, key = Authority.make(tmp_path).sign("nats")
    text = manifest(f"{size}/nats.yaml: ConfigMap")["data"]["nats.conf"]
    for inside, outside in (("ca.crt", "ca.pem"), ("tls.crt", certificate), ("tls.key", key)):
        text = text.replace(f"/tls/{inside}", str(tmp_path / outside))
    path = tmp_path / "nats.conf"
    path.write_text(text)
    done = subprocess.run(
        [find_nats_server(), "--config", path, "-t"],
        env={"POD_NAME": "nats-0", "NATS_TOKEN": "text"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr


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
        given_s = float(services[name]["stop_grace_period"].removesuffix("s"))
        assert given_s > max(frontend_grace_s(config), config.shutdown.whole_s)
        assert config.data_plane.tcp.host == "0.0.0.0"
    assert services["frontend"]["ports"] == ["127.0.0.1:8787:8787", "127.0.0.1:9090:9090"]
    assert services["frontend"]["environment"]["TRINAMO_HTTP__STATUS_PORT"] == "9090"


def test_the_image_runs_as_nobody_of_importance() -> None:
    lines = (ROOT / "Dockerfile").read_text("utf-8").splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]

    assert users == ["10001"]
    assert 'ENTRYPOINT ["trinamo"]' in lines

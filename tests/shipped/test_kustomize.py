"""The folders of `deploy/kubernetes` put together as `kubectl apply --kustomize` does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from starlette.routing import Route

from tests.needs import KUBECTL
from tests.shipped.kustomize import Thing, of_kubernetes, render
from tests.sources import ROOT
from tests.transports.security.fleets import FleetOfTest
from trinamo.cli.children.shared_port import frontend_grace_s
from trinamo.runtime.config.config import Config, load_config
from trinamo.runtime.config.keys import is_loopback
from trinamo.runtime.env import RealEnv
from trinamo.runtime.http.app import HealthAnswer, build_status_app
from trinamo.runtime.http.metrics import FrontendMetrics
from trinamo.runtime.http.service import HttpService
from trinamo.runtime.traces.ring import Traces
from trinamo.transports.assembly.http import Http
from trinamo.transports.security.roles import Role

KUBERNETES = ROOT / "deploy" / "kubernetes"
SIZES = ("small", "medium", "large")
NAME = "app.kubernetes.io/name"
MARGIN_S = 10
"""For what a process does besides: to hear of the signal, and to import what it needs for its end."""
PROGRESS_S = 600
"""Of Kubernetes: a rollout that gets no further for so long has failed."""
OVERLAY = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../medium]
components: [../disaggregated, ../scraped, ../keyed, ../certified, ../scaled]
"""


def has_kustomize_5() -> bool:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return False
    told = subprocess.run(
        [kubectl, "version", "--client"], capture_output=True, text=True, check=False, timeout=120
    )
    return re.search(r"Kustomize Version: v[5-9]", told.stdout) is not None


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """An overlay of somebody's own, with all components, beside the shipped folders."""
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    folder = tmp_path / "kubernetes" / "own"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(OVERLAY)
    return folder


def failing_s(probe: Thing) -> float:
    """How long a probe takes at most to see that something is not so."""
    times = probe.get("failureThreshold", 3) * probe.get("periodSeconds", 10)
    return float(times + probe.get("timeoutSeconds", 1))


def configuration(things: list[Thing], folder: Path) -> Config:
    """What the processes of these manifests read, with the defaults of the code."""
    path = folder / "trinamo.yaml"
    path.write_text(named(things)["ConfigMap trinamo"]["data"]["trinamo.yaml"])
    return load_config(path, environ={})


def named(things: list[Thing]) -> dict[str, Thing]:
    found = {f"{each['kind']} {each['metadata']['name']}": each for each in things}
    assert len(found) == len(things), "two things of one name"
    return found


def pods(things: list[Thing]) -> dict[str, Any]:
    return {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in things
        if each["kind"] in ("Deployment", "StatefulSet")
    }


@pytest.mark.parametrize("size", SIZES)
def test_each_size_is_a_whole_cluster_that_fits_the_schema(size: str) -> None:
    things = render(KUBERNETES / size)

    for each in things:
        kubernetes_validate.validate(each, "1.30", strict=True)
    assert set(pods(things)) == {"trinamo-frontend", "trinamo-worker", "etcd", "nats"}
    assert {"ConfigMap trinamo", "Service trinamo-frontend"} <= set(named(things))


def test_every_folder_has_a_kustomization_that_names_every_file_in_it() -> None:
    for folder in sorted(path for path in KUBERNETES.iterdir() if path.is_dir()):
        said = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert {name for name in said["resources"] if name.endswith(".yaml")} == files


def test_with_the_components_workers_have_two_roles_and_are_scraped(own: Path) -> None:
    things = render(own)

    for each in filter(of_kubernetes, things):
        kubernetes_validate.validate(each, "1.30", strict=True)
    found = pods(things)
    roles = {
        name: found[name]["spec"]["containers"][0]["args"][-2:]
        for name in ("trinamo-worker", "trinamo-prefill")
    }
    assert roles == {
        "trinamo-worker": ["--role", "decode"],
        "trinamo-prefill": ["--role", "prefill"],
    }
    assert "PodDisruptionBudget trinamo-prefill" in named(things)
    for name in ("trinamo-frontend", "trinamo-worker", "trinamo-prefill", "etcd"):
        told = found[name]["metadata"]["annotations"]
        ports = {each["containerPort"] for each in found[name]["spec"]["containers"][0]["ports"]}
        assert told["prometheus.io/scrape"] == "true"
        assert int(told["prometheus.io/port"]) in ports


def test_what_an_autoscaler_sizes_has_no_size_of_its_own(own: Path) -> None:
    """And what it asks Prometheus for is there under that name."""
    things = render(own)

    by_name = named(things)
    scalers = [each for each in things if "scaleTargetRef" in each.get("spec", {})]
    assert {each["kind"] for each in scalers} == {"HorizontalPodAutoscaler", "ScaledObject"}
    for each in scalers:
        target = by_name[f"Deployment {each['spec']['scaleTargetRef']['name']}"]
        assert "replicas" not in target["spec"]
    queries = " ".join(str(each) for each in scalers)
    told = (ROOT / "docs" / "operations.md").read_text("utf-8")
    for name in set(re.findall(r"trinamo_\w+", queries)):
        assert f"`{name}`" in told


def test_every_process_gets_a_certificate_of_its_role_that_it_can_use(
    own: Path, tmp_path: Path
) -> None:
    """As cert-manager issues what the manifests ask it for."""
    things = named(render(own))
    fleet = FleetOfTest.make(tmp_path / "fleet")
    assert things["ClusterIssuer trinamo-authority"]["spec"]["ca"]
    for role in ("frontend", "worker", "prefill"):
        asked = things[f"Certificate trinamo-{role}"]["spec"]
        assert asked["issuerRef"]["name"] == "trinamo-authority"
        assert asked["uris"] == [Role(role).uri]
        assert asked["privateKey"]["algorithm"] == "Ed25519"
        assert asked["usages"] == ["digital signature", "client auth", "server auth"]
        pod = things[f"Deployment trinamo-{role}"]["spec"]["template"]["spec"]
        (volume,) = [each for each in pod["volumes"] if each["name"] == "fleet"]
        assert volume["secret"]["secretName"] == asked["secretName"]
        (container,) = pod["containers"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "fleet"]
        environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        file = tmp_path / "trinamo.yaml"
        file.write_text(things["ConfigMap trinamo"]["data"]["trinamo.yaml"])
        tls = load_config(file, environ=environ).security.tls
        files = {tls.certificate_file, tls.key_file, tls.authority_file}
        assert files == {
            f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")
        }
        assert fleet.member(role).certificate.roles == {Role(role)}


def test_prefill_workers_are_as_decode_workers_but_for_their_role() -> None:
    texts = [
        (KUBERNETES / path).read_text("utf-8").partition("apiVersion")[2]
        for path in ("common/worker.yaml", "disaggregated/prefill.yaml")
    ]

    decode, prefill = texts
    assert prefill == decode.replace("trinamo-worker", "trinamo-prefill").replace(
        "exact]", "exact, --role, prefill]"
    )


@pytest.mark.parametrize("size", [*SIZES, "own"])
def test_what_goes_at_once_leaves_enough(own: Path, size: str, tmp_path: Path) -> None:
    things = render(own.parent / size)
    budgets = {
        each["spec"]["selector"]["matchLabels"][NAME]: each["spec"]["maxUnavailable"]
        for each in things
        if each["kind"] == "PodDisruptionBudget"
    }
    streams = configuration(things, tmp_path).event_plane.nats.stream_replicas
    # An autoscaler says how many there are at least, and its Deployment says nothing.
    least = {
        each["spec"]["scaleTargetRef"]["name"]: each["spec"].get("minReplicas")
        or each["spec"]["minReplicaCount"]
        for each in things
        if each["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    }

    assert budgets.keys() == pods(things).keys()
    for each in things:
        if each["kind"] == "Deployment":
            name = each["metadata"]["name"]
            assert budgets[name] == 1 < each["spec"].get("replicas", least.get(name, 0))
            # A new one serves before an old one goes.
            strategy = {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
            assert each["spec"]["strategy"] == strategy
        elif each["kind"] == "StatefulSet" and each["spec"]["replicas"] > 1:
            # A majority of the members, and of those that have a stream.
            name, count = each["metadata"]["name"], each["spec"]["replicas"]
            voting = count if name == "etcd" else min(count, streams)
            assert 2 * budgets[name] < voting


@pytest.mark.parametrize("size", [*SIZES, "own"])
def test_pods_have_the_time_that_their_configuration_takes_to_end(
    own: Path, size: str, tmp_path: Path
) -> None:
    things = render(own.parent / size)
    config = configuration(things, tmp_path)
    for name, template in pods(things).items():
        pod = template["spec"]
        (container,) = pod["containers"]
        ready, live, start = (
            container[f"{each}Probe"] for each in ("readiness", "liveness", "startup")
        )
        if name in ("etcd", "nats"):
            continue
        ends_s = config.shutdown.whole_s
        if name == "trinamo-frontend":
            ends_s = frontend_grace_s(config)
            # Whoever goes by readiness, a balancer of the cloud say, sees it before requests are refused.
            assert failing_s(ready) <= config.http.lame_duck_s
        # The process itself waits for the balancer, and knows that it leaves; see decision 0050.
        assert "lifecycle" not in container
        assert pod["terminationGracePeriodSeconds"] >= ends_s + MARGIN_S
        # A step that hangs ends the process before a probe does, with words and a drain.
        assert failing_s(live) > (config.worker.hang_timeout_s or 0)
        assert failing_s(start) > config.worker.upstream.start_timeout_s
        assert failing_s(start) < PROGRESS_S
    (nats,) = (
        each for each in things if each["kind"] == "ConfigMap" and "nats.conf" in each["data"]
    )
    told = re.findall(r"lame_duck_\w+: (\d+)s", nats["data"]["nats.conf"])
    assert len(told) == 2
    # SIGTERM behind the `preStop` leaves the lame duck its time.
    assert pods(things)["nats"]["spec"]["terminationGracePeriodSeconds"] > sum(map(int, told))


def test_probes_and_services_name_ports_and_paths_that_there_are(own: Path, tmp_path: Path) -> None:
    things = render(own)
    config = configuration(things, tmp_path)
    env = RealEnv()
    metrics = FrontendMetrics(env)
    frontend = HttpService(config.http, env, metrics, Http()).app
    worker = build_status_app(metrics, Traces(env.clock, 0), lambda: HealthAnswer(""))
    for role, app, number in (
        ("frontend", frontend, config.http.port),
        ("worker", worker, config.worker.status_port),
        ("prefill", worker, config.worker.status_port),
    ):
        (container,) = pods(things)[f"trinamo-{role}"]["spec"]["containers"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        paths = {each.path for each in app.routes if isinstance(each, Route)}
        asked = {
            probe: container[f"{probe}Probe"]["httpGet"]
            for probe in ("readiness", "liveness", "startup")
        }
        assert {ports[each["port"]] for each in asked.values()} == {number}
        assert {each["path"] for each in asked.values()} <= paths
        # One that serves nobody is left to live.
        assert asked["readiness"]["path"] == "/health"
        assert asked["liveness"]["path"] == asked["startup"]["path"] == "/live"
    service = named(things)["Service trinamo-frontend"]
    assert service["spec"]["ports"][0]["targetPort"] == "http"


@pytest.mark.parametrize("size", [*SIZES, "own"])
def test_what_leaves_a_machine_is_closed_by_a_secret_that_every_process_mounts(
    own: Path, size: str, tmp_path: Path
) -> None:
    things = render(own.parent / size)
    config = configuration(things, tmp_path)

    assert not is_loopback(config.data_plane.tcp.host)
    assert not config.security.clear_tcp
    for name, template in pods(things).items():
        if name in ("etcd", "nats"):
            continue
        pod = template["spec"]
        volumes = {each["name"]: each for each in pod["volumes"]}
        files = {
            f"{mount['mountPath']}/{item['path']}"
            for mount in pod["containers"][0]["volumeMounts"]
            for item in volumes[mount["name"]].get("secret", {}).get("items", ())
        }
        assert config.security.secret_file in files


@KUBECTL.unless(has_kustomize_5())
@pytest.mark.parametrize("size", [*SIZES, "own"])
def test_kubectl_puts_them_together_likewise(own: Path, size: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(own.parent / size)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stderr) == (0, "")
    theirs = list(yaml.safe_load_all(done.stdout))
    assert named(theirs) == named(render(own.parent / size))


def test_with_keys_frontends_read_them_from_a_secret(own: Path) -> None:
    pod = pods(render(own))["trinamo-frontend"]["spec"]

    container = pod["containers"][0]
    [file] = [e["value"] for e in container["env"] if e["name"] == "TRINAMO_HTTP__API_KEYS_FILE"]
    [mount] = [m for m in container["volumeMounts"] if file.startswith(f"{m['mountPath']}/")]
    [volume] = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "trinamo-api-keys"
    assert "TRINAMO_HTTP__API_KEYS_FILE" not in str(pods(render(KUBERNETES / "medium")))

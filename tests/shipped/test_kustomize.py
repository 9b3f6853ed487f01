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

from tests.session.needs import KUBECTL
from tests.shipped.kustomize import Thing, render
from tests.sources import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
SIZES = ("small", "medium", "large")
OVERLAY = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../medium]
components: [../disaggregated, ../scraped, ../keyed]
"""


def has_kustomize_5() -> bool:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        return False
    told = subprocess.run(
        [kubectl, "version", "--client"], capture_output=True, text=True, check=False, timeout=30
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

    for each in things:
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
    for name in ("trinamo-frontend", "trinamo-worker", "trinamo-prefill"):
        told = found[name]["metadata"]["annotations"]
        ports = {each["containerPort"] for each in found[name]["spec"]["containers"][0]["ports"]}
        assert told["prometheus.io/scrape"] == "true"
        assert int(told["prometheus.io/port"]) in ports


def test_prefill_workers_are_as_decode_workers_but_for_their_role() -> None:
    texts = [
        (KUBERNETES / path).read_text("utf-8").partition("apiVersion")[2]
        for path in ("common/worker.yaml", "disaggregated/prefill.yaml")
    ]

    decode, prefill = texts
    assert prefill == decode.replace("trinamo-worker", "trinamo-prefill").replace(
        "exact]", "exact, --role, prefill]"
    )


@KUBECTL.unless(has_kustomize_5())
@pytest.mark.slow
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

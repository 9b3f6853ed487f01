"""The alerts and the dashboard in `deploy/` ask for what real processes show, and are well-formed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import attrs
import httpx
import pytest
import yaml

from tests.cli.places import Place, cluster, wait_for
from tests.needs import PROMTOOL
from tests.runtime.metrics.test_conventions import SECOND_NAMES
from tests.sources import ROOT
from trinamo.runtime.env import RealEnv
from trinamo.runtime.errors import TrinamoError
from trinamo.runtime.metrics.metrics import Metrics
from trinamo.transports.sockets.certificates import CertificateSeries

PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS = PROMETHEUS / "alerts.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "trinamo.json"
NAME = re.compile(r"\b(?:trinamo|process|nixl|etcd)_[a-z0-9_]+")
SELECTED = re.compile(r"\b((?:trinamo|process|etcd)_[a-z0-9_]+)\{([^}]*)\}")
OF_PROMETHEUS = {"instance", "job"}
"""Labels that a scrape adds."""

needs_promtool = PROMTOOL.unless(shutil.which("promtool") is not None)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text("utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return found


def queries() -> Iterator[tuple[str, str]]:
    """Where an expression stands, and the expression."""
    for rule in alerts():
        yield rule["alert"], rule["expr"]
    board = json.loads(DASHBOARD.read_text("utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for note in board["annotations"]["list"]:
        yield note["name"], note["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", variable["query"]["query"]


@attrs.define
class Shown:
    """What the pages of a cluster show."""

    pages: dict[str, str]
    names: set[str] = attrs.field(factory=set)
    """Of samples as they may be asked for."""
    labels: dict[str, set[str]] = attrs.field(factory=dict)
    """Those seen, by the name of a sample that has been seen."""

    def read(self, page: str) -> None:
        for line in page.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                ends = ("_bucket", "_sum", "_count") if kind == "histogram" else ("",)
                self.names |= {name + end for end in ends}
            elif not line.startswith("#"):
                name, _, rest = line.partition("{")
                if rest:
                    labels = set(re.findall(r'(\w+)="', rest.rpartition("}")[0]))
                    self.labels.setdefault(name, set()).update(labels)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """A real cluster that has answered, with everything that its processes may show."""
    place = Place(tmp_path_factory.mktemp("monitored"))
    roles = ("--engine", "exact", "--disagg", "--prefill", "1", "--decode", "1")
    settings = ("disaggregation.prefill_tokens_local_max=64", "http.status_port=0")
    options = [word for each in (*settings, "router.policy=kv") for word in ("--set", each)]
    with cluster(place, *roles, *options) as running:
        body = {"prompt": "a long story " * 20, "max_tokens": 8}
        ask = Request(
            f"{running.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urlopen(ask, timeout=120) as response:
            assert response.status == 200

        def targets() -> list[str]:
            with urlopen(f"{running.url}/sd", timeout=120) as answer:
                return [group["targets"][0] for group in json.load(answer)]

        # The frontend's own port stands for it until its entry is there.
        api = running.url.removeprefix("http://")
        wait_for(lambda: len(set(targets()) - {api}) == 3, 120, "the list of all processes")
        found = Shown({})
        for address in targets():
            with urlopen(f"http://{address}/metrics", timeout=120) as answer:
                found.pages[address] = answer.read().decode()
        (run,) = (place.root / "run").rglob("*.json")
        (etcd,) = json.loads(run.read_text("utf-8"))["etcd"]
        through = httpx.HTTPTransport(uds=etcd.removeprefix("unix:"))
        with httpx.Client(transport=through, timeout=120) as client:
            found.read(client.get("http://etcd/metrics").text)
    metrics = Metrics(RealEnv())
    CertificateSeries(metrics, "http")
    for page in (*found.pages.values(), metrics.page().decode()):
        found.read(page)
    return found


def test_every_metric_of_the_alerts_and_the_dashboard_is_on_a_page(shown: Shown) -> None:
    missing = {
        (where, name)
        for where, expression in queries()
        for name in NAME.findall(expression)
        if name not in shown.names
    }

    assert not missing


def test_every_label_they_select_by_is_one_of_the_metric(shown: Shown) -> None:
    wrong = [
        (where, name, label)
        for where, expression in queries()
        for name, inside in SELECTED.findall(expression)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)
        if name in shown.labels and label not in shown.labels[name] | OF_PROMETHEUS
    ]

    assert not wrong


@needs_promtool
def test_promtool_finds_nothing_to_mend_on_the_pages(shown: Shown) -> None:
    for page in shown.pages.values():
        ours = [
            line
            for line in page.splitlines()
            if not any(name in line.split("{")[0] for name in SECOND_NAMES)
        ]
        done = subprocess.run(
            ["promtool", "check", "metrics"],
            input="\n".join([*ours, ""]),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_outcomes_that_alerts_name_are_codes_of_errors() -> None:
    def codes(cls: type[TrinamoError]) -> set[str]:
        return {cls.code}.union(*map(codes, cls.__subclasses__()))

    named = {
        code
        for rule in alerts()
        for selected in re.findall(r'outcome=~?"([^"]+)"', rule["expr"])
        for code in selected.split("|")
    }
    assert named
    assert named <= codes(TrinamoError)


def test_every_alert_says_how_bad_it_is_and_what_is_so() -> None:
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)


def test_every_panel_explains_itself_and_covers_no_other() -> None:
    covered: set[tuple[int, int]] = set()
    for panel in panels():
        if panel["type"] != "row":
            assert panel["description"].endswith("."), panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & covered, panel["title"]
        covered |= cells
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)


@needs_promtool
@pytest.mark.parametrize("kind", ["rules", "config"])
def test_promtool_takes_the_files(kind: str) -> None:
    path = ALERTS if kind == "rules" else PROMETHEUS / "prometheus.yml"

    assert promtool("check", kind, str(path)) == 0


LOST_UPSTREAMS = {
    "interval": "15s",
    "input_series": [
        {"series": 'trinamo_live_instances{endpoint="a/b/c"}', "values": "2x20 1x20 0x20"}
    ],
    "alert_rule_test": [
        {"eval_time": "5m", "alertname": "TrinamoInstanceLost", "exp_alerts": []},
        {"eval_time": "10m", "alertname": "TrinamoInstanceLost", "exp_alerts": ["warning"]},
        {"eval_time": "10m", "alertname": "TrinamoNoLiveInstance", "exp_alerts": []},
        {"eval_time": "15m", "alertname": "TrinamoNoLiveInstance", "exp_alerts": ["critical"]},
    ],
}
ROLLING_UPDATE = {
    "interval": "15s",
    "input_series": [
        {"series": 'trinamo_live_instances{endpoint="a/b/c"}', "values": "2x240 3x40 2x40"}
    ],
    "alert_rule_test": [
        {"eval_time": each, "alertname": "TrinamoInstanceLost", "exp_alerts": []}
        for each in ("1h5m", "1h15m", "1h20m")
    ],
}
"""The manifests start a new worker before an old one drains."""


@needs_promtool
def test_a_rolling_update_loses_no_instance(tmp_path: Path) -> None:
    path = tmp_path / "update.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [ROLLING_UPDATE]}))

    assert promtool("test", "rules", str(path)) == 0


@needs_promtool
def test_one_lost_instance_of_several_is_a_warning_and_the_last_one_is_critical(
    tmp_path: Path,
) -> None:
    texts = {rule["alert"]: rule["annotations"] for rule in alerts()}
    found = json.loads(json.dumps(LOST_UPSTREAMS))
    for each in found["alert_rule_test"]:
        told = {
            name: text.replace("{{ $labels.endpoint }}", "a/b/c")
            for name, text in texts[each["alertname"]].items()
        }
        each["exp_alerts"] = [
            {"exp_labels": {"severity": level, "endpoint": "a/b/c"}, "exp_annotations": told}
            for level in each["exp_alerts"]
        ]
    path = tmp_path / "lost.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [found]}))

    assert promtool("test", "rules", str(path)) == 0
    found["alert_rule_test"][1]["exp_alerts"] = []
    path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [found]}))
    assert promtool("test", "rules", str(path)) != 0


@needs_promtool
def test_promtool_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    expressions = [
        expression.replace("$__rate_interval", "5m").replace("$model", ".*")
        for where, expression in queries()
        if not where.startswith("variable")
    ]
    rules = [{"record": f"a:{number}", "expr": text} for number, text in enumerate(expressions)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))

    assert promtool("check", "rules", str(path)) == 0
    path.write_text(path.read_text().replace("sum", "summ"))
    assert promtool("check", "rules", str(path)) != 0


def promtool(*arguments: str) -> int:
    return subprocess.run(
        ["promtool", *arguments], capture_output=True, check=False, timeout=120
    ).returncode

"""Dashboard and alert rules speak of metrics and labels that a running server has."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.files import (
    COMPOSE,
    DASHBOARD,
    GRAFANA,
    PROMETHEUS,
    ROOT,
    alerts,
    compose,
    panels,
)
from tests.deploy.promql import filled_in, grouped_by, selectors
from tests.deploy.served import plain_server
from tests.helpers.videos import BODY, SYNC

__all__ = ["plain_server"]

pytestmark = [pytest.mark.core_model, pytest.mark.omni, pytest.mark.cpu, pytest.mark.timing]

ALERT_TEST = Path(__file__).with_name("alerts_test.yaml")
OF_PROMETHEUS = {"job", "instance"}
"""Labels that a scrape adds."""


def expressions() -> dict[str, str]:
    """Every query of both files, by where it stands."""
    found = {alert["alert"]: alert["expr"] for alert in alerts()}
    for panel in panels():
        for target in panel["targets"]:
            found[f"{panel['title']} {panel['id']}{target['refId']}"] = target["expr"]
    return found


def variables() -> dict[str, dict]:
    listed = json.loads(DASHBOARD.read_text())["templating"]["list"]
    return {variable["name"]: variable for variable in listed}


Samples = dict[str, list[dict[str, str]]]


@pytest.fixture(scope="module")
def scrape(plain_server) -> Samples:
    """Labels of all samples of ``/metrics`` after a video, by name."""
    assert httpx.post(f"{plain_server.address}{SYNC}", json=BODY, timeout=60).status_code == 200
    samples: Samples = {"up": [{}]}  # Prometheus makes this one itself
    for family in text_string_to_metric_families(plain_server.get("/metrics")[1]):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample.labels)
    return samples


def unknown(expression: str, samples: Samples) -> list[str]:
    """What an expression names and the server does not have."""
    wrong = []
    for selector in selectors(filled_in(expression)):
        found = samples.get(selector.metric, [])
        if not found:
            wrong.append(selector.metric)
            continue
        labels = set(found[0]) | OF_PROMETHEUS
        asked = {label for label, _, _ in selector.matchers} | grouped_by(expression)
        wrong += [f"{selector.metric}: {label}" for label in sorted(asked - labels)]
        for label, _, value in selector.matchers:
            known = {sample[label] for sample in found if label in sample}
            if known:
                wrong += [f"{label}={v}" for v in value.split("|") if not_there(v, known)]
    return wrong


def not_there(pattern: str, values: set[str]) -> bool:
    return not any(re.fullmatch(pattern, value) for value in values)


@pytest.mark.parametrize("place", expressions())
def test_a_query_resolves(place, scrape):
    assert unknown(expressions()[place], scrape) == []


@pytest.mark.parametrize(
    ("expression", "wrong"),
    [
        ("vllm_omni:chunks", ["vllm_omni:chunks"]),
        ('rate(vllm_omni:chunks_total{stage="0"}[5m])', ["vllm_omni:chunks_total: stage"]),
        ("sum by (rank) (vllm_omni:max_sessions)", ["vllm_omni:max_sessions: rank"]),
        (
            'increase(vllm_omni:requests_failed_total{reason=~"unknown|tired"}[5m]) > 0',
            ["reason=tired"],
        ),
        ("vllm_omni:max_sessions and vllm_omni:places", ["vllm_omni:places"]),
    ],
)
def test_what_the_server_does_not_have_is_found(expression, wrong, scrape):
    assert unknown(expression, scrape) == wrong


def test_every_metric_of_the_server_is_on_the_dashboard(scrape):
    asked = {s.metric for p in panels() for t in p["targets"] for s in selectors(t["expr"])}
    families = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in scrape}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    ours = {name for name in families if name.startswith("vllm_omni:")}
    # Counters have a second sample, the time of their creation.
    counters = {f"{name.removesuffix('_total')}" for name in ours if name.endswith("_total")}
    assert ours - counters - shown == set()


def test_the_variables_are_all_used_and_filled_from_a_metric(scrape):
    text = " ".join(t["expr"] for panel in panels() for t in panel["targets"])
    used = set(re.findall(r'"\$(\w+)"', text))
    queried = {name: v["query"] for name, v in variables().items() if v["type"] == "query"}
    assert used == set(queried)
    for query in queried.values():
        inner, label = re.fullmatch(r"label_values\((.+), (\w+)\)", query["query"]).groups()
        assert unknown(f"sum by ({label}) ({inner})", scrape) == []


def test_panels_lie_side_by_side_and_say_what_they_show():
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(set(ids)) == len(ids)
    units = {panel["title"]: panel["fieldConfig"]["defaults"].get("unit") for panel in panels()}
    assert units.pop("Time between chunks, spread") is None  # a heatmap has it on its axis
    assert None not in units.values()


def test_the_stack_finds_its_parts():
    services = compose(COMPOSE)["services"]
    (datasource,) = yaml.safe_load(
        (GRAFANA / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    assert datasource["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    assert "server" in services
    assert {f'job="{job["job_name"]}"'} == set(
        re.findall(r'job="[^"]*"', " ".join(alert["expr"] for alert in alerts()))
    )
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    folder, name = home.rsplit("/", 1)
    assert (ROOT / mounts[folder] / name).resolve() == DASHBOARD


def test_promtool_tries_every_alert_on_series_made_for_it():
    tests = yaml.safe_load(ALERT_TEST.read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    # Each fires once, and each is silent once in the same file.
    named = {alert["alert"] for alert in alerts()}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == named
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian's package prometheus)")
    for command in (
        ["check", "config", PROMETHEUS / "prometheus.yml"],
        ["test", "rules", ALERT_TEST],
    ):
        run = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_operators_page_explains_every_alert():
    page = (ROOT / "docs" / "deploy" / "monitoring.md").read_text()
    rows = re.findall(r"^\| `(VllmOmni\w+)` \|", page, re.MULTILINE)
    assert rows == [alert["alert"] for alert in alerts()]

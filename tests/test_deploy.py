"""What deploy/ ships asks only for what the server has: metrics, labels, services, files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.messages import Ready
from runtime.stats import Stats
from server.apis.ops import routes as operation
from server.app import ROUTES
from server.metrics.metrics import Metrics
from server.pages import routes as pages

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
GRAFANA = DEPLOY / "grafana"
BOARDS = {
    file.stem: json.loads(file.read_text()) for file in (GRAFANA / "dashboards").glob("*.json")
}
# What every selector begins with.
SELECTORS = ('job=~"$job"', 'instance=~"$instance"', 'model_name=~"$model_name"')
METRIC = re.compile(r"(?<![\w:])(?:wavefill[_:]|process_)[\w:]+")
SUFFIXES = {
    "counter": ("",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}
BY_SCRAPING = {"instance", "job"}


def exported() -> tuple[set[str], set[str]]:
    """The names of all series that a server exports, and of all their labels."""
    metrics = Metrics("tiny-chat")
    numbers = 99, 64, 16, 4, 8, 64, 1, 1, 0.5
    ready = Ready(1, "m", "cpu", "float32", "mha", *numbers, num_states=9)
    metrics.watch(ready=lambda: ready, stats=Stats, state=lambda: "ready")
    metrics.request_finished("stop", 1, 2, arrived=1.0, started=2.0, first_token=3.0, ended=4.0)
    metrics.inter_token(0.1)
    metrics.rejected("queue_full")
    metrics.aborted("client")
    metrics.http_request("/v1/completions", 200, 0.1)
    text = metrics.render().decode()
    families = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    names = {name + suffix for name, kind in families for suffix in SUFFIXES[kind]}
    return names, set(re.findall(r'[{,](\w+)="', text))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[tuple[str, dict[str, Any]]]:
    return [
        (f"{name}: {panel['title']}", panel)
        for name, board in sorted(BOARDS.items())
        for panel in board["panels"]
        if panel["type"] != "row"
    ]


RECORDED = {rule["record"] for rule in rules() if "record" in rule}
EXPRESSIONS = [
    *((f"rule {rule.get('alert', rule.get('record'))}", rule["expr"]) for rule in rules()),
    *(
        (f"{name} {target['refId']}", target["expr"])
        for name, panel in panels()
        for target in panel["targets"]
    ),
]


EXPRESSION_TEXTS = [expression for _, expression in EXPRESSIONS]


def labels_in(expression: str) -> set[str]:
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=(?!=))\s*\"", expression)
    grouped = re.findall(r"\b(?:by|without)\s*\(([^)]*)\)", expression)
    return {*matched, *(label.strip() for group in grouped for label in group.split(","))}


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[w for w, _ in EXPRESSIONS])
def test_every_expression_names_metrics_and_labels_that_exist(where: str, expression: str) -> None:
    names, labels = exported()
    used = set(METRIC.findall(expression))
    assert used or "up{" in expression, f"{where} reads no metric"
    assert used - names - RECORDED == set()
    assert labels_in(expression) - labels - BY_SCRAPING == set()


def test_label_and_metric_names_are_found_in_an_expression() -> None:
    expression = 'sum by (le, gone) (rate(wavefill_x_bucket{code=~"5..", a!="b"}[5m])) == 0'
    assert labels_in(expression) == {"le", "gone", "code", "a"}
    assert METRIC.findall(expression) == ["wavefill_x_bucket"]


def test_the_dashboards_are_what_their_code_makes() -> None:
    """`python deploy/grafana/make_dashboards.py` writes them."""
    code = "import json, make_dashboards; print(json.dumps(make_dashboards.texts()))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=GRAFANA, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    texts: dict[str, str] = json.loads(ran.stdout)
    assert set(texts) == set(BOARDS) == {"overview", "latency", "capacity", "engine"}
    for name, text in texts.items():
        assert (GRAFANA / "dashboards" / f"{name}.json").read_text() == text


@pytest.mark.parametrize(("where", "panel"), panels(), ids=[where for where, _ in panels()])
def test_a_panel_explains_itself_and_shows_one_quantity(where: str, panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 20
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] and panel["fieldConfig"]["overrides"] == [], "one axis, one unit"
    assert panel["datasource"]["uid"] == "${datasource}"
    if panel["type"] == "stat":
        assert defaults["thresholds"]["steps"]
    for target in panel["targets"]:
        assert target["datasource"]["uid"] == "${datasource}"
        selectors = re.findall(r"{([^{}]+)}", target["expr"])
        assert selectors and all(s.startswith(", ".join(SELECTORS)) for s in selectors)
    # Courses on one axis: of one metric, or of two whose comparison is the point.
    used = {metric for target in panel["targets"] for metric in METRIC.findall(target["expr"])}
    if panel["type"] == "timeseries":
        assert len(used) <= 2


def test_a_share_of_what_an_engine_has_is_not_added_up_over_engines() -> None:
    """A server may have several: their sum is no share."""
    for name, panel in panels():
        of_one = panel["fieldConfig"]["defaults"]["unit"] == "percentunit"
        for target in panel["targets"]:
            expression = target["expr"]
            if of_one and "/" not in expression and "sum" in expression:
                assert "engine" in labels_in(expression), name


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_a_dashboard_lets_data_source_job_instance_and_objective_be_chosen(name: str) -> None:
    board = BOARDS[name]
    variables = [variable["name"] for variable in board["templating"]["list"]]
    assert variables == ["datasource", "job", "instance", "model_name", "slo_ttft", "slo_itl"]
    assert board["uid"] == f"wavefill-{name}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    kinds = {panel["type"] for panel in board["panels"]}
    assert {"stat", "timeseries"} <= kinds
    assert ("heatmap" in kinds) == (name != "overview")


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_panels_do_not_overlap(name: str) -> None:
    places = [panel["gridPos"] for panel in BOARDS[name]["panels"]]
    taken: set[tuple[int, int]] = set()
    for at in places:
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken
        taken |= cells


def test_the_data_source_that_is_provisioned_is_the_default() -> None:
    file = GRAFANA / "provisioning" / "datasources" / "prometheus.yaml"
    (source,) = yaml.safe_load(file.read_text())["datasources"]
    assert source["isDefault"] and source["url"] == "http://prometheus:9090"


def test_errors_are_counted_on_the_routes_of_the_api_and_on_no_others() -> None:
    """Probes ask often and answer 503 while a model loads: they would make a ratio meaningless.

    The files of the pages never fail, and would hide errors.
    """
    (rule,) = (r for r in rules() if r.get("record") == "wavefill:http_requests:error_ratio_5m")
    found = re.findall(r'route=~"([^"]+)"(?:, route!="([^"]+)")?', " ".join(EXPRESSION_TEXTS))
    (pattern, left_out), *others = set(found)
    assert others == [], "the dashboards count as the alert does"
    selectors = re.findall(r"wavefill_http_requests_total{([^}]+)}", rule["expr"])
    assert selectors and all("route=~" in selector for selector in selectors)
    counted = re.compile(f"(?!{left_out}$)(?:{pattern})")
    assert counted.fullmatch("none") is None, "requests that were refused before their route"
    for module in ROUTES:
        for route in module.endpoints.router.routes:
            path: str = route.path  # type: ignore[attr-defined]
            assert (counted.fullmatch(path) is not None) == (module not in (operation, pages)), path


def test_alerts_have_a_duration_or_a_window_a_severity_and_a_summary() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert alerts
    for alert in alerts:
        assert "for" in alert or "increase(" in alert["expr"]
        assert alert["labels"]["severity"] in {"warning", "critical"}
        assert alert["annotations"]["summary"]


def test_the_documentation_says_when_each_alert_fires() -> None:
    text = (ROOT / "docs" / "operate.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `Wavefill")]
    named = [name for row in rows for name in re.findall(r"`(Wavefill\w+)`", row)]
    assert sorted(named) == sorted(rule["alert"] for rule in rules() if "alert" in rule)


def test_every_alert_is_seen_firing_in_the_rule_tests() -> None:
    tests = yaml.safe_load((DEPLOY / "rules_test.yml").read_text())["tests"]
    fired = {
        case["alertname"]
        for test in tests
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in rules() if "alert" in rule}


def test_the_lines_for_nginx_in_the_documentation_are_those_of_its_configuration() -> None:
    text = (ROOT / "docs" / "replicas.md").read_text()
    (block,) = re.findall(r"^```\n(upstream .*?)^```", text, re.M | re.S)
    lines = (DEPLOY / "nginx.conf").read_text().splitlines()
    shown = {line.strip() for line in block.splitlines() if "10.0.0." not in line}
    assert shown <= {line.partition("#")[0].strip() for line in lines}


def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return document


def test_prometheus_scrapes_the_name_that_the_servers_answer_to() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert job["job_name"] == "wavefill", "the rules ask for this job"
    host, port = target.split(":")
    for name in ("server-cpu", "server-gpu"):
        service = compose()["services"][name]
        assert service["networks"]["default"]["aliases"] == [host]
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_prometheus_reads_its_key_from_the_file_that_is_mounted() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    volumes = compose()["services"]["prometheus"]["volumes"]
    (key,) = (volume for volume in volumes if isinstance(volume, dict))
    assert job["authorization"]["credentials_file"] == key["target"]
    assert key["source"] == "${PROMETHEUS_KEY_FILE:-./no-key}"
    assert (DEPLOY / "no-key").read_bytes() == b"", "a server without keys needs none"


def test_compose_starts_one_server_a_profile_with_both_monitors() -> None:
    services = compose()["services"]
    for profile in ("cpu", "gpu"):
        chosen = {name for name, service in services.items() if profile in service["profiles"]}
        assert chosen == {f"server-{profile}", "prometheus", "grafana"}


def test_compose_builds_targets_of_the_dockerfile_and_mounts_files_that_exist() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert stages[-1] == "cuda", "the last stage is the default"
    for service in compose()["services"].values():
        if "build" in service:
            assert service["build"]["target"] in stages
            assert (DEPLOY / service["build"]["context"]).resolve() == ROOT
        for volume in service["volumes"]:
            source = volume["source"] if isinstance(volume, dict) else volume.split(":")[0]
            source = re.sub(r"^\${\w+:-(.*)}$", r"\1", source)  # a variable's default
            if source.startswith("."):
                assert (DEPLOY / source).exists()
            else:
                assert source in compose()["volumes"]


def test_servers_run_read_only_without_capabilities_and_have_time_to_drain() -> None:
    for name in ("server-cpu", "server-gpu"):
        service = compose()["services"][name]
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert int(service["stop_grace_period"].removesuffix("s")) > 30

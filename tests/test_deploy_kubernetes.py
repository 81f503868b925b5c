"""The chart's values, the plain manifests and the systemd unit fit the server and each other."""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from runtime.messages import Ready
from runtime.stats import Stats
from server.apis.ops import routes as operation
from server.cli.commands import serve
from server.cli.flags import ALIASES, MAX_RANKS
from server.config import ServerConfig
from server.metrics.metrics import Metrics
from tests.support.operator_kinds import KINDS

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CHART, KUBERNETES = DEPLOY / "helm", DEPLOY / "kubernetes"
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
GIVEN = {file.stem: yaml.safe_load(file.read_text()) for file in KUBERNETES.glob("values/*.yaml")}
MANIFESTS = {file.stem: file.read_text() for file in KUBERNETES.glob("*.yaml")}
NAMES = sorted(MANIFESTS)


def objects(name: str) -> dict[str, dict[str, Any]]:
    """The objects of a plain manifest by their kind."""
    documents = list(yaml.safe_load_all(MANIFESTS[name]))
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


def pod(name: str) -> dict[str, Any]:
    return objects(name)["Deployment"]["spec"]["template"]


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["spec"]["containers"]
    return only


def drain_seconds(words: list[str]) -> tuple[float, float]:
    """--drain-delay and --drain-seconds of `wavefill serve` with these arguments."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_arguments(parser)
    args, usual = parser.parse_args(words), ServerConfig()
    delay = usual.drain_delay if args.drain_delay is None else float(args.drain_delay)
    return delay, usual.drain_seconds if args.drain_seconds is None else float(args.drain_seconds)


def render_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kubernetes_render", KUBERNETES / "render.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def merged(given: dict[str, Any], below: dict[str, Any]) -> dict[str, Any]:
    """Values over the defaults of the chart, as Helm does it."""
    both = dict(below)
    for name, value in given.items():
        inner = isinstance(value, dict) and isinstance(below.get(name), dict)
        both[name] = merged(value, below[name]) if inner else value
    return both


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_of_the_chart_and_the_values_as_they_are_now(name: str) -> None:
    """If not: `make manifests`.  With Helm, `make test-deploy` compares the text as well."""
    assert (
        f"# {render_module().digest(KUBERNETES / 'values' / f'{name}.yaml')}\n" in MANIFESTS[name]
    )
    assert GIVEN.keys() == MANIFESTS.keys() == {"cpu", "gpu", "two-gpus", "autoscaling"}


@pytest.mark.parametrize("name", ["defaults", *NAMES])
def test_values_follow_the_schema(name: str) -> None:
    jsonschema.validate(merged(GIVEN.get(name, {}), DEFAULTS), SCHEMA)


@pytest.mark.parametrize(
    "wrong",
    [
        {"replica": 2},
        {"gpus": -1},
        {"tensorParallel": 0},
        {"args": ["-tp", "2"]},
        {"args": ["--data-parallel-size=2"]},
        {"drain": {"delay": 1}},
        {"args": ["--port"]},
        {"image": {"digest": "sha256:1"}},
        {"data": {"accessModes": []}},
        {"autoscaling": {"kvUsage": 80}},
    ],
    ids=str,
)
def test_the_schema_refuses_values_that_mean_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(wrong, DEFAULTS), SCHEMA)


def test_the_schema_knows_all_values_and_templates_use_all() -> None:
    templates = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    assert set(SCHEMA["properties"]) - {"global"} == DEFAULTS.keys()
    for name, value in DEFAULTS.items():
        assert f".Values.{name}" in templates, name
        if listed := SCHEMA["properties"][name].get("properties"):
            assert value.keys() <= listed.keys(), name
            if name != "resources":  # which are copied whole
                assert all(re.search(rf"\.{inner}\b", templates) for inner in value), name


def test_the_versions_of_the_chart_are_those_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]


@pytest.mark.parametrize("name", NAMES)
def test_the_server_understands_the_arguments_and_has_time_to_drain(name: str) -> None:
    command, *words = container(name)["args"]
    assert command == "serve"
    delay, seconds = drain_seconds(words)
    grace = pod(name)["spec"]["terminationGracePeriodSeconds"]
    assert grace >= delay + seconds + 15
    readiness = container(name)["readinessProbe"]
    notice = readiness["periodSeconds"] * readiness["failureThreshold"]
    assert delay > notice, "balancers that watch readiness notice before the port closes"


@pytest.mark.parametrize("name", NAMES)
def test_probes_ask_routes_that_exist_on_a_port_that_is_named(name: str) -> None:
    routes = {route.path for route in operation.endpoints.router.routes}  # type: ignore[attr-defined]
    ports = {port["name"] for port in container(name)["ports"]}
    for kind, path in (("startup", "/livez"), ("liveness", "/livez"), ("readiness", "/readyz")):
        asked = container(name)[f"{kind}Probe"]["httpGet"]
        assert asked["path"] == path and path in routes
        assert asked["port"] in ports
        # With --allowed-hosts the address of the pod would be refused.
        assert {"name": "Host", "value": "localhost"} in asked["httpHeaders"]
    (port,) = objects(name)["Service"]["spec"]["ports"]
    assert port["targetPort"] in ports


@pytest.mark.parametrize("name", NAMES)
def test_selectors_find_the_pods(name: str) -> None:
    found, labels = objects(name), pod(name)["metadata"]["labels"]
    selectors = [found["Service"]["spec"]["selector"]]
    for kind in ("Deployment", "PodDisruptionBudget"):
        selectors.append(found[kind]["spec"]["selector"]["matchLabels"])
    assert all(selector and selector.items() <= labels.items() for selector in selectors)


@pytest.mark.parametrize("name", NAMES)
def test_pods_run_with_no_more_rights_than_the_image_needs(name: str) -> None:
    of_pod, of_container = pod(name)["spec"]["securityContext"], container(name)["securityContext"]
    user = re.findall(r"^USER (\d+):(\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {(str(of_pod["runAsUser"]), str(of_pod["runAsGroup"]))} == set(user)
    assert of_pod["runAsNonRoot"] and of_pod["seccompProfile"] == {"type": "RuntimeDefault"}
    assert of_container["readOnlyRootFilesystem"] and of_container["capabilities"]["drop"] == [
        "ALL"
    ]
    assert of_container["allowPrivilegeEscalation"] is False
    assert pod(name)["spec"]["automountServiceAccountToken"] is False
    assert pod(name)["spec"]["enableServiceLinks"] is False, "they would set WAVEFILL_PORT"


@pytest.mark.parametrize("name", NAMES)
def test_what_the_image_writes_is_mounted(name: str) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in container(name)["volumeMounts"]}
    assert {"/data", "/tmp", "/dev/shm"} <= mounts.keys()
    volumes = {volume["name"]: volume for volume in pod(name)["spec"]["volumes"]}
    assert set(mounts.values()) == volumes.keys()
    claim = volumes[mounts["/data"]]["persistentVolumeClaim"]["claimName"]
    assert claim == objects(name)["PersistentVolumeClaim"]["metadata"]["name"]


@pytest.mark.parametrize("name", NAMES)
def test_images_are_targets_of_the_dockerfile_that_fit_the_devices(name: str) -> None:
    gpus = container(name)["resources"]["limits"].get("nvidia.com/gpu", 0)
    assert container(name)["image"] == ("wavefill:cuda" if gpus else "wavefill:cpu")
    assert gpus == {"cpu": 0, "two-gpus": 2}.get(name, 1)


def test_a_server_has_an_engine_or_a_rank_for_each_gpu() -> None:
    for name in NAMES:
        parser = argparse.ArgumentParser(exit_on_error=False)
        serve.add_arguments(parser)
        args = parser.parse_args(container(name)["args"][1:])
        used = int(args.tensor_parallel or 1) * int(args.data_parallel or 1)
        asked = container(name)["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert used == max(1, asked), name
    ranks = SCHEMA["properties"]["tensorParallel"]
    assert (ranks["minimum"], ranks["maximum"]) == (1, MAX_RANKS)
    options = re.compile(SCHEMA["properties"]["args"]["items"]["not"]["pattern"])
    for name in ("data_parallel", "tensor_parallel"):
        for flag in (f"--{name.replace('_', '-')}", *ALIASES[name]):
            assert options.match(flag), "the chart sets it"


def exported() -> str:
    metrics = Metrics("tiny-chat")
    ready = Ready(1, "m", "cpu", "float32", "mha", 99, 64, 16, 4, 8, 64, 1, 1, 0.5)
    metrics.watch(ready=lambda: ready, stats=Stats, state=lambda: "ready")
    return metrics.render().decode()


def test_replicas_follow_metrics_that_the_server_has() -> None:
    scaled = objects("autoscaling")["ScaledObject"]["spec"]
    monitor, service = objects("autoscaling")["ServiceMonitor"], objects("autoscaling")["Service"]
    deployment = objects("autoscaling")["Deployment"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "KEDA sets them"
    queries = [trigger["metadata"]["query"] for trigger in scaled["triggers"]]
    for query in queries:
        (metric,) = re.findall(r"wavefill_\w+", query)
        assert re.search(rf"^{metric}{{", exported(), re.MULTILINE), metric
        # The labels that the operator gives what it scrapes through this Service.
        assert f'service="{service["metadata"]["name"]}"' in query
    assert "requests_waiting" in queries[0]
    selector = monitor["spec"]["selector"]["matchLabels"]
    assert selector.items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    # The rules and dashboards ask for this job.
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "wavefill"
    assert objects("autoscaling")["PersistentVolumeClaim"]["spec"]["accessModes"] == [
        "ReadWriteMany"
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_objects_of_operators_have_only_fields_of_their_kind(kind: str) -> None:
    document = objects("autoscaling")[kind]
    jsonschema.validate(document, KINDS[kind])
    misspelt = json.dumps(document)
    for right, wrong in (("metricType", "metrictype"), ("interval", "period"), ("for", "while")):
        misspelt = misspelt.replace(f'"{right}"', f'"{wrong}"')
    with pytest.raises(jsonschema.ValidationError, match=r"metrictype|period|while"):
        jsonschema.validate(json.loads(misspelt), KINDS[kind])


def test_the_rules_of_the_chart_are_those_of_the_compose_file() -> None:
    assert (CHART / "rules.yml").resolve() == DEPLOY / "rules.yml"
    rules = yaml.safe_load((DEPLOY / "rules.yml").read_text())
    assert objects("autoscaling")["PrometheusRule"]["spec"] == rules


def test_the_chart_refuses_variables_for_the_options_that_it_sets() -> None:
    set_by_chart = set(
        re.findall(r"--([a-z-]+)", (CHART / "templates/deployment.yaml").read_text())
    )
    set_by_chart |= {"tensor-parallel", "data-parallel", "model", "host", "port"}
    refused = set(re.findall(r'"WAVEFILL_([A-Z_]+)"', (CHART / "templates/_names.tpl").read_text()))
    assert refused == {option.replace("-", "_").upper() for option in set_by_chart}


class Unit(configparser.ConfigParser):
    """A systemd unit: names in their own case, the last of several equal ones."""

    def __init__(self) -> None:
        super().__init__(strict=False, interpolation=None, delimiters=["="])
        self.optionxform = str  # type: ignore[assignment]
        self.read(DEPLOY / "wavefill.service")


def test_the_unit_starts_serve_and_waits_for_the_drain() -> None:
    service = Unit()["Service"]
    program, command, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, command) == ("wavefill", "serve")
    assert int(service["TimeoutStopSec"]) >= sum(drain_seconds(words)) + 15
    assert service["KillMode"] == "mixed", "SIGTERM is for the launcher, which stops its processes"
    assert service["RestartPreventExitStatus"] == "2", "options that cannot work"
    assert service["PrivateDevices"] == "no", "a GPU is a device"


def test_the_user_of_the_unit_is_in_the_group_of_the_keys_which_its_commands_make() -> None:
    text = (DEPLOY / "wavefill.service").read_text()
    group = Unit()["Service"]["SupplementaryGroups"]
    assert f"groupadd --system --force {group}\n" in text
    assert f"install -m 640 -g {group} wavefill.keys /etc/wavefill.keys\n" in text
    assert "WAVEFILL_API_KEY_FILE=/etc/wavefill.keys" in text

"""The Helm chart is rendered by Helm, and what comes out is checked by Kubernetes' own schemas."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from tests.support.operator_kinds import KINDS

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VALUES = sorted(KUBERNETES.glob("values/*.yaml"))
CUSTOM = KINDS.keys()  # whose schemas come with their operators
OLDEST = "1.27"  # of Chart.yaml


@pytest.fixture(scope="session")
def render() -> ModuleType:
    if shutil.which("helm") is None:
        pytest.importorskip("helm_python", reason="no helm: pip install -e '.[deploy]'")
    spec = importlib.util.spec_from_file_location("kubernetes_render", KUBERNETES / "render.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_a_plain_manifest_is_what_the_chart_renders(render: ModuleType, values: Path) -> None:
    """If not: `make manifests`."""
    assert (KUBERNETES / values.name).read_text() == render.text(values)


def problems(document: dict[str, Any], version: str) -> str:
    """What Kubernetes' schema of a version has against an object; empty if nothing."""
    validator = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[deploy]'")
    try:
        validator.validate(document, version, strict=True)
    except validator.ValidationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("version", [OLDEST, "1.34"])
@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_objects_follow_the_schemas_of_kubernetes(values: Path, version: str) -> None:
    documents = list(yaml.safe_load_all((KUBERNETES / values.name).read_text()))
    own = [document for document in documents if document["kind"] not in CUSTOM]
    assert len(own) == 4
    for document in own:
        assert problems(document, version) == "", document["kind"]


def definition(kind: str) -> dict[str, Any]:
    """The schema of a kind that an operator defines, from the folder CRDS; skips without one."""
    name = os.environ.get("CRDS")
    if not name:
        pytest.skip("CRDS names no folder with the CRDs of KEDA and the Prometheus operator")
    for file in sorted(Path(name).glob("*.yaml")):
        for document in filter(None, yaml.safe_load_all(file.read_text())):
            for found in document.get("items", [document]):  # kubectl prints several as a list
                if found["kind"] != "CustomResourceDefinition":
                    continue
                if found["spec"]["names"]["kind"] == kind:
                    schema = closed(found["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
                    schema["properties"]["metadata"] = {"type": "object"}
                    return schema
    raise AssertionError(f"no file of {name} defines {kind}")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuses what a schema does not list, which the API server would drop without a word."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    schema = dict(schema)
    if "properties" in schema:
        schema["properties"] = {name: closed(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            schema[inner] = closed(schema[inner])
    return schema


def wrong_in(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [error.message for error in found]


@pytest.mark.parametrize("source", ["in short", "of CRDS"])
@pytest.mark.parametrize("kind", sorted(CUSTOM))
def test_the_objects_of_operators_follow_the_definitions_of_their_kinds(
    render: ModuleType, kind: str, source: str
) -> None:
    schema = KINDS[kind] if source == "in short" else definition(kind)
    plain = list(yaml.safe_load_all((KUBERNETES / "autoscaling.yaml").read_text()))
    for documents in (plain, render.documents(EVERYTHING)):
        (document,) = [each for each in documents if each["kind"] == kind]
        assert wrong_in(document, schema) == []
    document["spec"]["minReplicas"] = 1
    assert any("minReplicas" in each for each in wrong_in(document, schema)), "it sees a mistake"


def test_the_ingress_of_the_documentation_follows_the_schemas() -> None:
    text = (DEPLOY.parent / "docs" / "replicas.md").read_text()
    blocks = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S))
    (ingress,) = (block for block in blocks if block["kind"] == "Ingress")
    assert problems(ingress, OLDEST) == problems(ingress, "1.34") == ""
    nginx = (DEPLOY / "nginx.conf").read_text()
    for name, value in ingress["metadata"]["annotations"].items():
        directive = name.partition("/")[2].replace("-", "_")
        directive = directive.replace("proxy_body_size", "client_max_body_size")
        assert re.search(rf"\b{directive} {value}s?;", nginx), "as nginx.conf has it"


def test_the_schemas_see_a_misspelt_key() -> None:
    deployment = next(yaml.safe_load_all((KUBERNETES / "cpu.yaml").read_text()))
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    container["startupProbe"]["periodSecond"] = 1
    assert "periodSecond" in problems(deployment, OLDEST)


EVERYTHING: dict[str, Any] = {
    "args": ["--max-model-len", "32k"],
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "image": {"digest": "sha256:" + "0" * 64, "pullSecrets": ["registry"]},
    "resources": {"requests": {}, "limits": {}},
    "apiKeySecret": "keys",
    "huggingFaceSecret": "hub",
    "data": {"existingClaim": "models"},
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "prometheusRule": {"enabled": True, "labels": {"role": "alert-rules"}},
    "autoscaling": {"enabled": True},
    "podLabels": {"team": "a"},
    "podAnnotations": {"c": "d"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
    "runtimeClassName": "nvidia",
}


def test_every_value_arrives_in_an_object(render: ModuleType) -> None:
    documents = render.documents(EVERYTHING)
    kinds = {document["kind"]: document for document in documents}
    assert "PersistentVolumeClaim" not in kinds, "there is one already"
    for document in documents:
        if document["kind"] not in CUSTOM:
            assert problems(document, OLDEST) == "", document["kind"]
    pod = kinds["Deployment"]["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert container["image"] == "wavefill@sha256:" + "0" * 64
    assert container["args"][-4:] == ["--api-key-file", "/keys/keys", "--max-model-len", "32k"]
    assert [variable["name"] for variable in container["env"]] == ["HF_TOKEN", "HTTPS_PROXY"]
    assert container["resources"]["limits"] == {"memory": "32Gi", "nvidia.com/gpu": 1}
    assert pod["metadata"]["labels"]["team"] == "a" and pod["metadata"]["annotations"]["c"] == "d"
    for name in ("nodeSelector", "tolerations", "affinity", "runtimeClassName"):
        assert pod["spec"][name] == EVERYTHING[name]
    assert pod["spec"]["imagePullSecrets"] == [{"name": "registry"}]
    assert kinds["Service"]["spec"]["type"] == "LoadBalancer"
    assert kinds["ServiceMonitor"]["metadata"]["labels"]["release"] == "prometheus"
    assert kinds["PrometheusRule"]["metadata"]["labels"]["role"] == "alert-rules"
    assert kinds["PrometheusRule"]["spec"] == yaml.safe_load((DEPLOY / "rules.yml").read_text())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"replicas": 2}, "data.accessModes={ReadWriteMany}"),
        ({"autoscaling": {"enabled": True}}, "data.accessModes={ReadWriteMany}"),
        ({"maxUnavailable": 0}, "maxSurge and maxUnavailable are both 0"),
        ({"autoscaling": {"minReplicas": 9}}, "minReplicas 9 is more than"),
        ({"replica": 2}, "replica"),
        ({"args": ["--port", "1"]}, "args"),
        ({"args": ["--tensor-parallel=2"]}, "args"),
        ({"env": [{"name": "WAVEFILL_PORT", "value": "1"}]}, "at port 8000: leave it out"),
        ({"env": [{"name": "WAVEFILL_DRAIN_SECONDS", "value": "1"}]}, "set drain.seconds"),
        ({"env": [{"name": "WAVEFILL_MODEL", "value": "m"}]}, "set model instead"),
        (
            {"env": [{"name": "HF_TOKEN", "value": "t"}], "huggingFaceSecret": "hub"},
            "set huggingFaceSecret instead",
        ),
        (
            {"env": [{"name": "WAVEFILL_API_KEY_FILE", "value": "f"}], "apiKeySecret": "keys"},
            "set apiKeySecret instead",
        ),
        ({"args": ["--api-key-file=f"], "apiKeySecret": "keys"}, "leave one of them out"),
        ({"gpus": 3, "tensorParallel": 2}, "gpus 3 is no multiple of tensorParallel 2"),
        ({"tensorParallel": 2}, "gpus 1 is no multiple of tensorParallel 2"),
    ],
    ids=str,
)
def test_values_that_cannot_work_are_refused_with_their_name(
    render: ModuleType, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        render.template(wrong)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, []),
        ({"gpus": 0}, []),
        ({"gpus": 2, "tensorParallel": 2}, ["--tensor-parallel", "2"]),
        ({"gpus": 4}, ["--data-parallel", "4"]),
        (
            {"gpus": 4, "tensorParallel": 2},
            ["--tensor-parallel", "2", "--data-parallel", "2"],
        ),
        ({"gpus": 0, "tensorParallel": 2}, ["--tensor-parallel", "2"]),
    ],
    ids=str,
)
def test_a_server_uses_all_gpus_that_its_pod_asks_for(
    render: ModuleType, given: dict[str, int], words: list[str]
) -> None:
    documents = {each["kind"]: each for each in render.documents({**given, "args": ["--last"]})}
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][6:] == [*words, "--last"]
    gpus = given.get("gpus", 1)
    assert container["resources"]["limits"].get("nvidia.com/gpu", 0) == gpus
    (shared,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": f"{max(1, gpus)}Gi"}


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    if helm := shutil.which("helm"):
        command = [helm, "lint", "--strict", str(DEPLOY / "helm")]
        ran = subprocess.run(command, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout
    else:
        helm_python = pytest.importorskip("helm_python", reason="pip install -e '.[deploy]'")
        result = helm_python.lint(str(DEPLOY / "helm"), {}, strict=True)
        assert not result["errors"], result


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    text = (DEPLOY / "wavefill.service").read_text()
    installed = text.replace("/opt/wavefill/bin/wavefill", sys.executable)
    assert installed != text
    unit = tmp_path / "wavefill.service"

    def verdict(content: str) -> str:
        unit.write_text(content)
        command = [analyze, "verify", "--man=no", str(unit)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stderr

    assert verdict(installed) == ""
    assert "KillMood" in verdict(installed.replace("KillMode", "KillMood")), "it sees a mistake"

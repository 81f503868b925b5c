"""Writes the plain manifests of this folder: the Helm chart with the values of values/.

    make manifests

The helm program renders, or the Python package helm-python-sdk, which has Helm inside; no cluster
is needed.  Each manifest names the digest of what it was rendered from, so that a test without Helm
sees that one is missing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
CHART = HERE.parent / "helm"
RELEASE, NAMESPACE = "wavefill", "default"


def values() -> dict[str, Path]:
    """The files of values by the name of their manifest."""
    return {file.stem: file for file in sorted((HERE / "values").glob("*.yaml"))}


def digest(file: Path) -> str:
    """Of the chart and of a file of values."""
    parts = [path for path in sorted(CHART.rglob("*")) if path.is_file()]
    found = hashlib.sha256()
    for path in (*parts, file):
        found.update(f"{path.relative_to(HERE.parent)}\n".encode() + path.read_bytes() + b"\n")
    return found.hexdigest()


def template(given: dict) -> str:
    """What `helm template` prints for these values."""
    if helm := shutil.which("helm"):
        command = [helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--values", "-"]
        ran = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
        if ran.returncode != 0:
            raise ValueError(ran.stderr.strip())
        return ran.stdout
    try:
        import helm_python
    except ImportError:
        raise SystemExit("neither helm nor the package helm-python-sdk is installed") from None
    try:
        files = helm_python.Chart.load(str(CHART)).render(given, name=RELEASE, namespace=NAMESPACE)
    except helm_python.HelmError as error:
        raise ValueError(str(error)) from None
    return "\n---\n".join(text for name, text in sorted(files.items()) if name.endswith(".yaml"))


def documents(given: dict) -> list[dict]:
    """The objects of the chart with these values, in one order whatever renders them."""
    found = [document for document in yaml.safe_load_all(template(given)) if document]
    return sorted(found, key=lambda document: (document["kind"], document["metadata"]["name"]))


def plain(document: dict) -> dict:
    """An object as it is without Helm."""
    document["metadata"].get("labels", {}).pop("app.kubernetes.io/managed-by", None)
    pod = document["spec"].get("template", {}).get("metadata", {})
    pod.get("labels", {}).pop("app.kubernetes.io/managed-by", None)
    annotations = document["metadata"].get("annotations", {})
    annotations.pop("helm.sh/resource-policy", None)
    if not annotations:
        document["metadata"].pop("annotations", None)
    return document


def text(file: Path) -> str:
    """The manifest for a file of values."""
    comment = [line for line in file.read_text().splitlines() if line.startswith("#")]
    head = [*comment, "#", f"# kubectl apply -f deploy/kubernetes/{file.name}", "#"]
    head += ["# Written by `make manifests` from deploy/helm, of which this is the digest:"]
    head += [f"# {digest(file)}", ""]
    objects = [plain(document) for document in documents(yaml.safe_load(file.read_text()))]
    return "\n".join(head) + yaml.safe_dump_all(objects, sort_keys=False, width=100)


def main() -> None:
    for name, file in values().items():
        (HERE / f"{name}.yaml").write_text(text(file))
        print(f"deploy/kubernetes/{name}.yaml")


if __name__ == "__main__":
    sys.exit(main())

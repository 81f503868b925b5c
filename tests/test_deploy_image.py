"""The image is built from what the lock files, pyproject.toml and the ignore file say."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
IMAGE = ROOT / "deploy" / "image"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
INSTRUCTIONS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))
LOCKS = {file.stem: file.read_text() for file in IMAGE.glob("*.txt")}
TARGETS = ("cpu", "cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def stage(name: str) -> list[str]:
    """The instructions of a stage of the Dockerfile."""
    found = re.search(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM|\Z)", INSTRUCTIONS, re.M | re.S)
    assert found, f"the Dockerfile has no stage {name}"
    return [line for line in found[1].splitlines() if line.strip()]


def tool(name: str) -> ModuleType:
    """A script of deploy/image/, as a module."""
    spec = importlib.util.spec_from_file_location(f"image_{name}", IMAGE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def packages(*locks: str) -> dict[str, Version]:
    lines = re.findall(r"^([\w.-]+)==(\S+)", "".join(LOCKS[name] for name in locks), re.M)
    assert len(lines) == len(dict(lines)), "a package is in two files, or in one twice"
    return {name: Version(version) for name, version in lines}


def installed(target: str) -> dict[str, Version]:
    return packages("dependencies", f"torch-{target}")


@pytest.mark.parametrize("target", TARGETS)
def test_the_locked_versions_are_those_that_the_project_allows(target: str) -> None:
    versions = installed(target)
    needs = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["otel"]
    for need in map(Requirement, needs):
        if need.marker is None or need.marker.evaluate({"sys_platform": "linux"}):
            assert need.specifier.contains(versions[need.name]), need


def test_every_line_of_a_lock_file_is_a_version_a_hash_or_the_comment() -> None:
    """No index and no address: those are the builder's own."""
    line = re.compile(r"[\w.-]+==[\w.+]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?|# Written by .*")
    for name, text in LOCKS.items():
        assert [x for x in text.splitlines() if not line.fullmatch(x)] == [], name
    assert set(LOCKS) == {"dependencies", "torch-cpu", "torch-cuda", "build"}


def test_every_locked_package_has_a_hash() -> None:
    parse = tool("lock").parse
    for name, text in LOCKS.items():
        assert parse(text).keys() == packages(name).keys()
        assert all("--hash=sha256:" in block for block in parse(text).values())


def test_the_lock_script_reads_what_pyproject_asks_for() -> None:
    needs, torch = tool("lock").requirements(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    )
    assert [Requirement(need).name for need in torch] == ["torch"]
    names = {Requirement(need).name for need in needs}
    assert {"fastapi", "opentelemetry-sdk"} <= names <= packages("dependencies").keys()


def test_the_cpu_target_has_neither_cuda_nor_triton() -> None:
    names = packages("torch-cpu").keys()
    assert not [name for name in names if re.match(r"nvidia|cuda|triton", name)]
    assert {"triton", "nvidia-cublas"} <= packages("torch-cuda").keys()


def test_both_targets_have_the_same_version_of_pytorch() -> None:
    cpu, cuda = installed("cpu")["torch"], installed("cuda")["torch"]
    assert (cpu.public, cpu.local) == (cuda.public, "cpu") and cuda.local is None


def test_the_wheel_is_built_with_what_pyproject_names() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for need in map(Requirement, pyproject["build-system"]["requires"]):
        assert need.specifier.contains(packages("build")[need.name])


@pytest.mark.parametrize("target", TARGETS)
def test_layers_go_from_what_rarely_changes_to_our_code(target: str) -> None:
    copies = [line.split()[1:3] for line in stage(target) if line.startswith("COPY")]
    assert copies == [
        [f"--from=torch-{target}", "/layer"],
        ["--from=dependencies", "/layer"],
        ["--from=wheel", "/weights"],
        ["--from=wheel", "/layer"],
    ]


@pytest.mark.parametrize("name", ["torch-cpu", "torch-cuda", "dependencies"])
def test_a_layer_of_dependencies_depends_on_its_lock_file_alone(name: str) -> None:
    copied = [line.split()[1] for line in stage(name) if line.startswith("COPY")]
    assert copied == [f"deploy/image/{name}.txt"]
    assert any(f"--require-hashes -r {name}.txt" in line for line in stage(name))


@pytest.mark.parametrize("target", TARGETS)
def test_labels_say_where_the_image_is_from(target: str) -> None:
    (label,) = [line for line in stage(target) if line.startswith("LABEL")]
    names = set(re.findall(r"org\.opencontainers\.image\.([\w.]+)=", label))
    assert {"version", "revision", "source", "created", "base.name", "base.digest"} <= names
    arguments = {line.split()[1].split("=")[0] for line in stage(target) if line.startswith("ARG")}
    used = set(re.findall(r"\${(\w+)}", label))
    assert used == arguments, "an argument of a build is in effect in its own stage only"
    # After the layers: other labels make no other layers.
    assert stage(target).index(label) == len(stage(target)) - 1
    script = (IMAGE / "build.sh").read_text()
    assert used == set(re.findall(r'--build-arg "(\w+)=', script)) - {"PIP_EXTRA_ARGS"}


def test_all_that_the_image_writes_is_in_its_volume() -> None:
    lines = stage("runtime")
    (environment,) = [line for line in lines if line.startswith("ENV")]
    values = dict(word.split("=", 1) for word in environment.split()[1:])
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert values[name] == "/data" or values[name].startswith("/data/"), name
    assert 'VOLUME ["/data"]' in lines
    # A folder of the volume, such as one that is named triton, is no package of Python.
    assert values["PYTHONSAFEPATH"] == "1"


def test_image_runs_as_a_user_that_is_not_root_under_an_init() -> None:
    assert all("USER 10001:0" in stage(target) for target in TARGETS)
    assert 'ENTRYPOINT ["tini", "-s", "--", "wavefill"]' in stage("runtime")
    assert "STOPSIGNAL SIGTERM" in stage("runtime")


def test_image_copies_what_the_ignore_file_lets_through() -> None:
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    files = {str(p.relative_to(ROOT)) for name in allowed for p in ROOT.glob(name)}
    copied = re.findall(r"^COPY ((?!--).+) \S+$", DOCKERFILE, re.MULTILINE)
    assert {name for line in copied for name in line.split()} == files
    assert all(list(ROOT.glob(name)) for name in allowed)


@pytest.mark.parametrize(
    "script",
    [ROOT / "deploy" / "verify.sh", *sorted(IMAGE.glob("*.sh"))],
    ids=lambda path: path.name,
)
def test_a_shell_script_parses(script: Path) -> None:
    ran = subprocess.run(["sh", "-n", str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("name", ["lock.py", "layers.py"])
def test_a_tool_of_the_image_says_how_it_is_used(name: str) -> None:
    command = [sys.executable, str(IMAGE / name), "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "usage:" in ran.stdout, ran.stderr


@pytest.mark.parametrize("saved", ["plain", "gzip"])
def test_a_layer_has_one_digest_and_both_sizes_however_it_was_saved(saved: str) -> None:
    layer = bytes(range(256)) * 10_000
    packed = gzip.compress(layer)
    archive = io.BytesIO(packed if saved == "gzip" else layer)
    digest, blob = tool("layers").read(archive, compress=True)
    assert digest == "sha256:" + hashlib.sha256(layer).hexdigest()
    assert blob.size == len(layer)
    assert 0 < blob.compressed < len(layer) / 10
    assert saved == "plain" or blob.compressed == len(packed)


def test_a_layer_is_listed_with_the_step_that_made_it() -> None:
    layers = tool("layers")
    made = [{"created_by": "ENV a=b", "empty_layer": True}, {"created_by": "COPY  one"}]
    config = json.dumps({"rootfs": {"diff_ids": ["sha256:1"]}, "history": made}).encode()
    found = {"sha256:2": layers.Blob(len(config), 0, config)}
    assert layers.steps(found, ["sha256:1"]) == ["COPY one"]
    assert layers.steps(found, ["sha256:3"]) == [""], "of another image"


def test_compose_mounts_one_volume_where_the_image_writes() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    for name in ("server-cpu", "server-gpu"):
        assert services[name]["volumes"] == ["data:/data"]

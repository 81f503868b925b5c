"""The oldest or the newest versions that pyproject.toml allows, as pip's constraints.

    python tests/support/dependency_bounds.py oldest [--torch 2.13.0] > constraints.txt

`oldest` pins each dependency to its lower bound; `newest` pins nothing, for pip takes the newest
version within the bounds.  `--torch` takes another version of torch in either.  Only what users
install is pinned, not the tools of the tests.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
REQUIREMENT = re.compile(r"(?P<name>[\w-]+)>=(?P<lower>[\w.]+)[^;]*(?P<marker>;.*)?")
INSTALLED_EXTRAS = ("otel",)


def requirements() -> list[str]:
    """What users install: the dependencies, and those of the extras that `test` installs, too."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(each for name in INSTALLED_EXTRAS for each in extras[name])]


def constraints(which: str, torch: str | None) -> list[str]:
    """Lines of a constraints file; each dependency has a lower bound, or there is an error."""
    lines: list[str] = []
    for requirement in requirements():
        found = REQUIREMENT.fullmatch(requirement)
        if found is None:
            raise SystemExit(f"{PYPROJECT.name}: {requirement!r} has no lower bound: add >=")
        name = found["name"]
        pinned = torch if name == "torch" and torch else None
        if name == "triton" and torch:
            continue  # each torch names the one version of Triton that it works with
        if which == "oldest":
            pinned = pinned or found["lower"]
        if pinned:
            lines.append(f"{name}=={pinned}{found['marker'] or ''}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", choices=("oldest", "newest"))
    parser.add_argument("--torch", metavar="VERSION", help="of torch, instead of the bound")
    args = parser.parse_args()
    print("\n".join(constraints(args.which, args.torch)))


if __name__ == "__main__":
    main()

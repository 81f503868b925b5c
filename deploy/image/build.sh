#!/bin/sh
# Builds a target of the Dockerfile with all its labels.
#
#   sh deploy/image/build.sh cuda|cpu [build options ...]
#
# such as  --build-arg PIP_EXTRA_ARGS="--find-links DIR"  or  -t registry.example/wavefill:1.
# From the environment:
#   BUILDER        docker, podman or buildah: the first that works
#   BASE           the base image, python:3.11-slim-bookworm
#   BASE_DIGEST    sha256:... of it
#   PIP_EXTRA_ARGS pip's options, which for cpu say where PyTorch's CPU build is
#   NAME           the image's name: wavefill, to which the target is added as the tag
# Its date is that of the commit, so that the same commit makes
# the same labels.
set -eu

target=${1:?usage: sh deploy/image/build.sh cuda|cpu [build options ...]}
shift
root=$(cd "$(dirname "$0")/../.." && pwd)
for builder in ${BUILDER:-docker podman buildah}; do
    "$builder" info >/dev/null 2>&1 && break
    builder=
done
[ -n "$builder" ] || { echo "none of docker, podman and buildah works here" >&2; exit 1; }
case $builder in
    # Podman's and buildah's own format has no health check.
    podman) set -- build --format docker --layers "$@" ;;
    buildah) set -- bud --format docker --layers "$@" ;;
    *) set -- build "$@" ;;
esac

git() { command git -C "$root" "$@" 2>/dev/null; }
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
revision=$(git rev-parse HEAD || true)
[ -z "$revision" ] || git diff --quiet HEAD || revision=$revision-dirty
created=$(git log -1 --format=%cI || true)
source=$(git remote get-url origin || true)
# An address may have a name and a password in it.
source=$(printf %s "$source" | sed 's#//[^/@]*@#//#')

set -- "$@" --target "$target" -t "${NAME:-wavefill}:$target" \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" \
    --build-arg "SOURCE=$source" --build-arg "CREATED=${created:-$(date -u +%FT%TZ)}"
[ -z "${BASE:-}" ] || set -- "$@" --build-arg "BASE=$BASE"
[ -z "${BASE_DIGEST:-}" ] || set -- "$@" --build-arg "BASE_DIGEST=$BASE_DIGEST"
[ -z "${PIP_EXTRA_ARGS:-}" ] || set -- "$@" --build-arg "PIP_EXTRA_ARGS=$PIP_EXTRA_ARGS"
exec "$builder" "$@" "$root"

#!/bin/sh
# Builds the image and runs it as production would.
#
#   sh deploy/verify.sh                        both targets: cpu and cuda
#   sh deploy/verify.sh cpu                    one target
#   sh deploy/verify.sh IMAGE [run options]    an image that is built already, such as
#                                              wavefill:cuda --gpus all
#
# Of each target: it builds; deploy/image/check.py passes (a read-only root file system, no
# capabilities, a user that is not root, answers, a memory limit, a stop with open streams); and a
# change of one line of ours makes new layers of less than 5 MB.
#
# From the environment, beside what deploy/image/build.sh and check.py take:
#   BUILD_OPTIONS  options of the build, such as  --volume DIR:/wheels:ro
# If the base image cannot be pulled and buildah and debootstrap are there (as root), it is made of
# Debian's packages.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
image=$here/image
wide=5 # MB that a release of a changed line may move

case ${1:-} in
    '' | cpu | cuda) targets=${1:-cpu cuda} ;;
    *) exec python3 "$image/check.py" "$@" ;;
esac

# Podman runs what buildah builds; docker what docker builds.
if [ -z "${BUILDER:-}" ]; then
    for BUILDER in docker buildah podman; do
        "$BUILDER" info >/dev/null 2>&1 && break
        BUILDER=
    done
fi
[ -n "$BUILDER" ] || { echo "none of docker, buildah and podman works here" >&2; exit 1; }
[ "$BUILDER" = docker ] && ENGINE=${ENGINE:-docker} || ENGINE=${ENGINE:-podman}
export BUILDER ENGINE

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ "$ENGINE" = podman ] && [ -z "${CONTAINERS_CONF:-}" ] && ! [ -d /run/systemd/system ]; then
    # Without systemd podman has to keep its own cgroups; and limits of the number of open files may
    # not be raised in some virtual machines of continuous integration.
    cat >"$scratch/containers.conf" <<CONF
[containers]
default_ulimits=["nofile=20000:20000", "nproc=30000:30000"]
[engine]
cgroup_manager="cgroupfs"
events_logger="file"
$(command -v runc >/dev/null 2>&1 && echo 'runtime="runc"')
CONF
    export CONTAINERS_CONF="$scratch/containers.conf"
fi

base=${BASE:-python:3.11-slim-bookworm}
has_base() { "$ENGINE" image inspect "$base" >/dev/null 2>&1; }
if ! has_base && ! "$ENGINE" pull --quiet "$base" >/dev/null 2>&1; then
    echo "$base cannot be pulled: a base image is made of Debian's packages"
    BASE=$(sh "$image/debian_base.sh" | tail -n 1)
    export BASE
fi

# The sources as they will be after the next release, which changes a line.
mkdir "$scratch/next"
(cd "$here/.." && tar -cf - --exclude=./.git --exclude=./.venv .) | tar -xf - -C "$scratch/next"
echo '# The next release.' >>"$scratch/next/server/app.py"

failed=
for target in $targets; do
    echo "$target: building; the log is $target-build.log"
    # shellcheck disable=SC2086
    if ! sh "$image/build.sh" "$target" ${BUILD_OPTIONS:-} >"$target-build.log" 2>&1; then
        tail -n 20 "$target-build.log"
        failed="$failed $target"
        continue
    fi
    python3 "$image/check.py" "wavefill:$target" || failed="$failed $target"
    # shellcheck disable=SC2086
    NAME=wavefill-next sh "$scratch/next/deploy/image/build.sh" "$target" ${BUILD_OPTIONS:-} \
        >>"$target-build.log" 2>&1 || failed="$failed $target"
    python3 "$image/layers.py" "wavefill-next:$target" "wavefill:$target" --below "$wide" ||
        failed="$failed $target"
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }

#!/bin/sh
# Makes a base image of Debian's own packages, for where no registry can be reached.
#
#   sh deploy/image/debian_base.sh         as root; makes localhost/wavefill-base:bookworm
#   BASE=localhost/wavefill-base:bookworm sh deploy/image/build.sh cpu --pull-never
#
# It needs debootstrap and buildah, a minute, and a mirror of Debian.  MIRROR names another.
set -eu

name=localhost/wavefill-base:bookworm
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The headers of Python and a C compiler are for the cuda target, where Triton compiles a module.
debootstrap --variant=minbase --include=python3,python3-venv,python3-dev,ca-certificates,tini \
    bookworm "$folder/root" ${MIRROR:+"$MIRROR"} >"$folder/log" 2>&1 ||
    { tail -n 5 "$folder/log" >&2; exit 1; }
# No apt run of a build may leave its lists and its cache in a layer.
cat >"$folder/root/etc/apt/apt.conf.d/docker-clean" <<'CONF'
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
CONF
rm -rf "$folder"/root/var/cache/apt/* "$folder"/root/var/lib/apt/lists/* "$folder"/root/var/log/*.log
tar --numeric-owner -C "$folder/root" -cf "$folder/base.tar" .
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/base.tar" / >/dev/null
buildah commit --quiet --rm "$container" "$name" >/dev/null
echo "$name"

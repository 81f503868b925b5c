#!/bin/sh
# Installs packages of /opt/venv into a folder of their own, which becomes a layer of the image.
#
#   sh build_layer.sh FOLDER PIP_ARGUMENTS...      such as  /layers/torch --require-hashes -r torch-cpu.txt
#
# The same packages make the same bytes: files have one date, and bytecode is compiled without the
# date of its source.  So a layer that was built again without a cache is still the layer that
# registries and nodes have.
set -eu

folder=$1
shift
# No package may bring others: the lock file names them all.
# shellcheck disable=SC2086
/opt/pip/bin/pip --python /opt/venv/bin/python install --quiet --root-user-action=ignore --no-deps \
    --no-compile --ignore-installed --root "$folder" --prefix /opt/venv ${PIP_EXTRA_ARGS:-} "$@"

# Packages have templates and files for other versions of Python that do not compile.
/opt/venv/bin/python -m compileall -q -q -f --invalidation-mode unchecked-hash -s "$folder" -p / \
    "$folder/opt/venv" || true
find "$folder" -exec touch -h -d @0 {} +

# Wavefill in a container.  `make image` and `make image TARGET=cpu` build it with all its labels.
#
#   docker build -t wavefill:cuda .                       for a GPU: the last stage is the default
#   docker build --target cpu -t wavefill:cpu \
#     --build-arg PIP_EXTRA_ARGS="--find-links DIR_OR_URL"  for a CPU
#
# The cpu target wants PyTorch's CPU build.  Where that comes from is yours to say, with pip's own
# options in PIP_EXTRA_ARGS: another package index, or a directory of wheels that the builder
# mounts (--find-links).
#
# What is installed is in the lock files of deploy/image/, with hashes; `make lock` writes them.
#
# Layers, from what rarely changes to what each release changes: PyTorch, the other dependencies,
# the weights of the built-in model, our code.  Each is made by a stage of its own.
#
# No CUDA base image: PyTorch's wheels carry the CUDA libraries, and the driver comes from the
# host's container toolkit.
ARG BASE=python:3.11-slim-bookworm
# sha256:... of the base image, so that each build starts from the same bytes.
ARG BASE_DIGEST=""

# ---- what both targets run in ------------------------------------------------------------------
FROM ${BASE}${BASE_DIGEST:+@}${BASE_DIGEST} AS base
# Versions follow the base image's Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates tini \
    && rm -rf /var/lib/apt/lists/*

# ---- the virtual environment, without pip, and pip beside it -------------------------------------
FROM base AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv --without-pip /opt/venv && python3 -m venv /opt/pip
WORKDIR /src
COPY deploy/image/build_layer.sh ./

FROM builder AS dependencies
ARG PIP_EXTRA_ARGS=""
COPY deploy/image/dependencies.txt ./
RUN sh build_layer.sh /layer --require-hashes -r dependencies.txt

FROM builder AS wheel
ARG PIP_EXTRA_ARGS=""
COPY deploy/image/build.txt ./
# hadolint ignore=SC2086
RUN /opt/pip/bin/pip install --quiet --require-hashes ${PIP_EXTRA_ARGS} -r build.txt
COPY pyproject.toml README.md LICENSE ./
COPY server server
COPY runtime runtime
COPY attention attention
COPY model_zoo model_zoo
RUN /opt/pip/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir /wheel . \
    && sh build_layer.sh /layer --no-index /wheel/*.whl
# The weights of the built-in model are most of our bytes, and change with few releases.
RUN packages="$(echo /layer/opt/venv/lib/python3*/site-packages)" \
    && weights="model_zoo/tiny_chat/model.safetensors" \
    && to="/weights/${packages#/layer/}/${weights}" \
    && mkdir -p "$(dirname "${to}")" \
    && mv "${packages}/${weights}" "${to}" \
    && find /layer /weights -exec touch -h -d @0 {} +

# ---- what both targets share -------------------------------------------------------------------
FROM base AS runtime
# Group 0 may write where root may: platforms that choose the user id keep the group.
# The folders are in the layers of what is copied into them: with one date, as the rest has.
RUN mkdir /data && chown 10001:0 /data && chmod g=u /data \
    && python3 -B -m venv --without-pip /opt/venv \
    && find /opt -exec touch -h -d @0 {} +
# One mount keeps all that is written: models, compiled kernels, what was measured of the GPU.
# PYTHONSAFEPATH: no folder of it is taken for a package of Python.
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/data \
    HF_HOME=/data/huggingface \
    XDG_CACHE_HOME=/data/cache \
    TRITON_CACHE_DIR=/data/cache/triton \
    CUDA_CACHE_PATH=/data/cache/cuda \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    WAVEFILL_HOST=0.0.0.0 \
    WAVEFILL_PORT=8000
VOLUME ["/data"]
WORKDIR /data
EXPOSE 8000
STOPSIGNAL SIGTERM
# /health is 503 until the model is loaded; the start period leaves time for a large one.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request; \
urllib.request.urlopen(f\"http://127.0.0.1:{os.environ['WAVEFILL_PORT']}/health\", timeout=4)"]
ENTRYPOINT ["tini", "-s", "--", "wavefill"]
# The address and the port are in the environment, so that another command line keeps them.
CMD ["serve"]

# ---- cpu ---------------------------------------------------------------------------------------
FROM builder AS torch-cpu
ARG PIP_EXTRA_ARGS=""
COPY deploy/image/torch-cpu.txt ./
RUN sh build_layer.sh /layer --require-hashes -r torch-cpu.txt \
    || { echo "the cpu target needs PyTorch's CPU build: --build-arg PIP_EXTRA_ARGS=... says where \
it is; see Containers in docs/operate.md" >&2; exit 1; }

FROM runtime AS cpu
COPY --from=torch-cpu /layer /
COPY --from=dependencies /layer /
COPY --from=wheel /weights /
COPY --from=wheel /layer /
USER 10001:0
ARG BASE
ARG BASE_DIGEST=""
ARG VERSION=""
ARG REVISION=""
ARG SOURCE=""
ARG CREATED=""
LABEL org.opencontainers.image.title="Wavefill" \
      org.opencontainers.image.description="OpenAI-compatible inference server for large language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"

# ---- cuda (default) ----------------------------------------------------------------------------
FROM builder AS torch-cuda
ARG PIP_EXTRA_ARGS=""
COPY deploy/image/torch-cuda.txt ./
RUN sh build_layer.sh /layer --require-hashes -r torch-cuda.txt

FROM runtime AS cuda
# Triton compiles a small driver module when it starts: it needs a C compiler and Python's headers.
# The official Python image has the headers; Debian's own Python keeps them in python3-dev.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -c "import os, sysconfig; \
path = sysconfig.get_path('include') + '/Python.h'; \
assert os.path.exists(path), f'{path} is missing: install the headers of this Python'"
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=torch-cuda /layer /
COPY --from=dependencies /layer /
COPY --from=wheel /weights /
COPY --from=wheel /layer /
USER 10001:0
ARG BASE
ARG BASE_DIGEST=""
ARG VERSION=""
ARG REVISION=""
ARG SOURCE=""
ARG CREATED=""
LABEL org.opencontainers.image.title="Wavefill" \
      org.opencontainers.image.description="OpenAI-compatible inference server for large language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.source="${SOURCE}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}"

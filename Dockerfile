# Wavefill in a container.
#
#   docker build -t wavefill:cuda .                       for a GPU: the last stage is the default
#   docker build --target cpu -t wavefill:cpu \
#     --build-arg PIP_EXTRA_ARGS="--find-links DIR_OR_URL"  for a CPU
#
# The cpu target wants PyTorch's CPU build.  Where that comes from is yours to say, with pip's own
# options in PIP_EXTRA_ARGS: an index (--index-url, --extra-index-url) or a directory of wheels that
# the builder mounts (--find-links).  Without them pip installs PyTorch with its CUDA libraries.
#
# No CUDA base image: PyTorch's wheels carry the CUDA libraries, and the driver comes from the
# host's container toolkit.
ARG BASE=python:3.11-slim-bookworm

# ---- what both targets run in ------------------------------------------------------------------
FROM ${BASE} AS base
# Versions follow the base image's Debian release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates tini \
    && rm -rf /var/lib/apt/lists/*

# ---- the virtual environment: PyTorch, then the other dependencies, then our own wheel -----------
FROM base AS builder
ARG PIP_EXTRA_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml ./
# Our dependencies without our code, so that a change of the code does not download them again.
# hadolint ignore=SC2086
RUN /opt/venv/bin/python -c "import tomllib; \
print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > needs.txt \
    && grep -E '^torch\b' needs.txt > torch.txt \
    && /opt/venv/bin/pip install ${PIP_EXTRA_ARGS} -r torch.txt
# hadolint ignore=SC2086
RUN /opt/venv/bin/pip install ${PIP_EXTRA_ARGS} -r needs.txt
COPY README.md LICENSE ./
COPY server server
COPY runtime runtime
COPY attention attention
COPY model_zoo model_zoo
# hadolint ignore=SC2086
RUN /opt/venv/bin/pip install ${PIP_EXTRA_ARGS} --no-deps .

# ---- what both targets share -------------------------------------------------------------------
FROM base AS runtime
LABEL org.opencontainers.image.title="Wavefill" \
      org.opencontainers.image.description="OpenAI-compatible inference server for large language models" \
      org.opencontainers.image.licenses="Apache-2.0"
# Group 0 may write where root may: platforms that choose the user id keep the group.
RUN mkdir -p /home/app/.cache/huggingface /home/app/.cache/triton /home/app/.cache/wavefill \
    && chown -R 10001:0 /home/app \
    && chmod -R g=u /home/app
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/home/app \
    HF_HOME=/home/app/.cache/huggingface \
    TRITON_CACHE_DIR=/home/app/.cache/triton \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    WAVEFILL_HOST=0.0.0.0 \
    WAVEFILL_PORT=8000
WORKDIR /home/app
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
FROM runtime AS cpu
COPY --from=builder /opt/venv /opt/venv
USER 10001:0

# ---- cuda (default) ----------------------------------------------------------------------------
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
COPY --from=builder /opt/venv /opt/venv
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:0

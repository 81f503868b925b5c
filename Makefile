# Two commands matter: `make serve` starts the server, `make test` passes the tests.
PYTHON ?= python3
MODEL ?= tiny-chat
BIN := .venv/bin
SECONDS ?= 600
# Processes that run tests, whole files each: of two cores more than two, since many tests wait for a
# server.  0 where there is a GPU, which tests do not share.
WORKERS ?= $(if $(wildcard /dev/nvidiactl),0,3)
PYTEST := $(BIN)/pytest -n $(WORKERS) --dist loadfile
# Tests start hundreds of processes, each of which would compile every module of ours again.
unexport PYTHONDONTWRITEBYTECODE

# What `make test-slow` runs; without `examples` the property tests keep to those of `make test`.
SLOW ?= slow or examples

# The target of the Dockerfile that `make image` builds: cuda or cpu.
TARGET ?= cuda

comma := ,
# $(call install,WHAT,ARGUMENTS OF PIP) is one line; what pip says follows if it fails.
define install
printf '%s' "Installing $(strip $1) ... "; began=$$(date +%s); \
	$(BIN)/python -m pip install --no-input --progress-bar off $2 > .venv/pip.log 2>&1 || \
	{ echo failed; cat .venv/pip.log; exit 1; }; \
	echo "$$(( $$(date +%s) - began )) s"
endef

.PHONY: serve test test-slow test-compiled test-all test-clients test-pages test-deploy test-versions \
	test-oldest test-newest soak lint format image lock manifests clean

serve: .venv/serve.stamp
	$(BIN)/wavefill serve $(MODEL) $(ARGS)

test: lint
	$(PYTEST) -m "not slow and not deploy and not compiled"

# The slow cases, and the tests of random examples with all of them.
test-slow: .venv/test.stamp
	$(PYTEST) -m "($(SLOW)) and not deploy" --hypothesis-profile=full

# What Triton makes of the kernels, for GPUs that are not there.
test-compiled: .venv/test.stamp
	$(PYTEST) -m compiled

test-all: test test-slow test-compiled

# Other people's clients and frameworks, which take a while to install.
test-clients: .venv/clients.stamp
	$(BIN)/pytest tests/clients

# The pages in a headless browser: the system's Chromium, else the one that Playwright downloads.
test-pages: .venv/pages.stamp
	$(BIN)/pytest tests/pages

# What deploy/ and docs/replicas.md say, by the programs they are for; skips name those that lack.
# With PIP_EXTRA_ARGS, which says where PyTorch's CPU build is, the image is built and run as well.
test-deploy: .venv/deploy.stamp
	$(BIN)/pytest -rs tests/deploy tests/test_deploy*.py

# The fast tests with the oldest and the newest dependencies that pyproject.toml allows, each in an
# environment of its own.  TORCH=2.13.0 takes another torch than the bound, and PIP_EXTRA_ARGS are
# pip's, such as an index that has PyTorch's CPU builds.
test-versions: test-oldest test-newest

test-oldest test-newest: test-%: .venv/serve.stamp
	test -x .venv-$*/bin/pip || $(PYTHON) -m venv .venv-$*
	$(BIN)/python tests/support/dependency_bounds.py $* $(if $(TORCH),--torch $(TORCH)) \
		> .venv-$*/constraints.txt
	.venv-$*/bin/pip install --quiet --upgrade --upgrade-strategy eager \
		-c .venv-$*/constraints.txt -e '.[test]' $(PIP_EXTRA_ARGS)
	.venv-$*/bin/pytest -n $(WORKERS) --dist loadfile -m "not slow and not deploy"

# A server at saturation, with kills, disconnects, slow readers and wrong requests.
soak: .venv/test.stamp
	$(BIN)/python -m benchmarks.server.bench_soak --seconds $(SECONDS)

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: .venv/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The container image, with its labels; ARGS are options of the build.
image:
	sh deploy/image/build.sh $(TARGET) $(ARGS)

# The lock files of the image.  ARGS=--upgrade takes the newest versions; CPU says where PyTorch's
# CPU build is, such as CPU="--find-links DIRECTORY".
lock: .venv/lock.stamp
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python deploy/image/lock.py --cpu="$(CPU)" $(ARGS)

# deploy/kubernetes/*.yaml from deploy/helm.
manifests: .venv/deploy.stamp
	$(BIN)/python deploy/kubernetes/render.py

clean:
	rm -rf .venv .venv-oldest .venv-newest build dist

.venv/serve.stamp: pyproject.toml
	@test -x $(BIN)/pip || $(PYTHON) -c "import sys; \
		sys.exit(not (3, 11) <= sys.version_info < (3, 14))" || \
		{ echo "$(PYTHON) is no Python 3.11 to 3.13: name one, such as PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(call install,pip,--upgrade pip)
	@$(call install,Wavefill into .venv (minutes the first time$(comma) since PyTorch is large),-e .)
	@touch $@

.venv/test.stamp: .venv/serve.stamp
	@$(call install,what the tests need,-e '.[test]')
	@touch $@

.venv/lock.stamp: .venv/serve.stamp
	@$(call install,what locks the image's packages,-e '.[lock]')
	@touch $@

.venv/clients.stamp: .venv/test.stamp
	@$(call install,clients to test with,-e '.[test$(comma)clients]')
	@touch $@

.venv/deploy.stamp: .venv/test.stamp
	@$(call install,what the tests of deploy/ need,-e '.[test$(comma)deploy]')
	@touch $@

.venv/pages.stamp: .venv/test.stamp
	@$(call install,Playwright,-e '.[test$(comma)pages]')
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ test "$$(id -u)" = 0 && apt-get update --quiet && \
			apt-get install --yes --no-install-recommends chromium; } || \
		$(BIN)/playwright install chromium
	touch $@

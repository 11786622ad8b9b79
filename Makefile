# Every target sets up what it needs: a fresh machine needs Python >= 3.11 and make.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
LOCKS := requirements/dev.lock requirements/checkpoint.lock

.DEFAULT_GOAL := help
.PHONY: help demo test quick lint format lock images kind e2e e2e-kind clean

help:  ## Show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

demo: .venv/ready  ## Federated learning for real, on this machine, in under 3 minutes (ARGS=--quick: in one)
	$(BIN)/gradsharding demo $(ARGS)

test: .venv/ready  ## Run every test
	$(BIN)/pytest -n 2 --dist loadgroup $(ARGS)

quick: .venv/ready  ## Run the tests that take seconds
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow and not cluster" $(ARGS)

lint: .venv/ready  ## ruff, mypy --strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/shellcheck scripts/*.sh tests/e2e/kind/kind.sh .ci/run

format: .venv/ready  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: .venv/ready  ## Resolve the dependencies anew
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --generate-hashes --python-version 3.11 --quiet --no-header --upgrade -o requirements/dev.lock
	$(BIN)/uv pip compile pyproject.toml --universal --generate-hashes --python-version 3.11 --quiet --no-header --upgrade -o requirements/reducer.lock
	$(BIN)/uv pip compile pyproject.toml --extra operator --extra lambda --universal --generate-hashes --python-version 3.11 --quiet --no-header --upgrade -o requirements/operator.lock

images:  ## Build and push both images: make images REGISTRY=host/path [TAG=...] (needs Docker)
	scripts/images.sh $(REGISTRY) $(TAG)

e2e: .venv/ready  ## The end-to-end tests on the cluster of KUBECONFIG; docs/operations.md lists the variables
	$(BIN)/pytest -m cluster tests/crd tests/e2e $(ARGS)

kind:  ## A kind cluster with Knative, MinIO, the images and the chart (needs Docker, kind, helm)
	tests/e2e/kind/kind.sh up

e2e-kind: .venv/ready  ## The end-to-end tests on that kind cluster
	tests/e2e/kind/kind.sh e2e

clean:  ## Remove what the targets made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache demo-output

# The stamp is the last step: an interrupted set-up starts anew.
.venv/ready: $(LOCKS) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, $(PYTHON) is older: name another with make PYTHON=python3.12 ..."; exit 1; }
	@echo "Setting up .venv from the lock (once, about a minute) ..."
	@$(PYTHON) -m venv --clear .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/checkpoint.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

SHELL := /bin/bash
export GRPO_CACHE ?= $(HOME)/.cache/grpo-operator
export GRPO_VENV ?= $(GRPO_CACHE)/venv
# The commands of the locked environment, and the packages that the distribution leaves out.
RUN := PATH=$(GRPO_VENV)/bin:$$PATH PYTHONPATH=$(CURDIR)/devcluster:$(CURDIR)/demo
MANIFEST ?= examples/quickstart.yaml
MINUTES ?= 60

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-oldest soak bench-scale setup lint types format crds binaries images up down status lock sbom release-check dist clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[36m%-11s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: ## Train SmolLM2 on a Kubernetes of two nodes on this machine (MANIFEST=... for another job)
	@$(RUN) scripts/demo.sh $(MANIFEST)

test: ## Lint, types, contracts, CRD drift, chart, and the tests that need no GPU
	@$(RUN) scripts/test.sh

test-long: ## More faults on the devcluster, a job for each kind of layer; stores the result in benchmarks/results/test_long.txt
	@$(RUN) scripts/setup.sh && $(RUN) scripts/agent_packages.sh $(GRPO_CACHE)/agents
	@$(RUN) PATH=$(GRPO_VENV)/bin:$$PATH:$(GRPO_CACHE)/uv/bin AGENT_PACKAGES=$(GRPO_CACHE)/agents scripts/record_tests.sh test_long -m "long and not gpu"

test-oldest: ## API tests on the oldest Kubernetes allowed; stores the result in benchmarks/results/test_oldest.txt
	@$(RUN) scripts/record_tests.sh test_oldest --oldest -m "api and not long" tests/api

soak: setup ## Random work under random faults for MINUTES (60); stores the result in benchmarks/results/soak.json
	$(RUN) python -m benchmarks.control_plane.soak --minutes $(MINUTES) --output benchmarks/results/soak.json

bench-scale: setup ## Measure GRPOJobs next to StatefulSets, JobSet and LWS; write docs/performance.md (about an hour)
	rm -f benchmarks/results/scale.jsonl
	$(RUN) python -m benchmarks.control_plane.scale
	$(RUN) python -m benchmarks.control_plane.page

setup: ## Install the locked Python environment into the cache
	@scripts/setup.sh

lint: setup ## Check style, import contracts, dependencies, CRD drift
	@$(RUN) scripts/lint.sh

types: setup ## Check types
	@$(RUN) mypy

format: setup ## Format the code and fix what can be fixed
	@$(RUN) ruff check --fix -q . ; $(RUN) ruff format .

crds: setup ## Write the CRD to crds/ and into the chart, and docs/fields.md, from the pydantic models
	@$(RUN) python -m grpo_operator.api.crd

binaries: setup ## Build Kubernetes and its helpers from pinned Go modules
	@$(RUN) python -m grpo_devcluster build >/dev/null

images: setup ## Build the operator's image and its base
	@$(RUN) python -m grpo_devcluster image build-operator

up: setup ## Start the devcluster
	@$(RUN) python -m grpo_devcluster up

down: setup ## Stop the devcluster
	@$(RUN) python -m grpo_devcluster down

status: setup ## Show the programs of the devcluster
	@$(RUN) python -m grpo_devcluster status

lock: setup ## Resolve pyproject.toml into requirements/*.txt (LOCK_FLAGS=--upgrade moves versions)
	@scripts/lock.sh

sbom: setup ## Write the images' bills of materials (CycloneDX) to dist/
	@$(RUN) scripts/sbom.sh

release-check: ## Compare all places that name the release with VERSION
	@scripts/release.sh check $(VERSION)

dist: setup ## Build what a release publishes beside images into dist/; helm must be installed
	@$(RUN) scripts/release.sh dist

clean: ## Remove what tests, linters and the demo left in this folder
	rm -rf demo-out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +

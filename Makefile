# `make recommend` sets up and runs the main job; `make test` sets up and passes the tests of a commit, `make test-slow` the others.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
TEST_PROCESSES ?= 2
JUDGES = $(VENV)/.titan $(VENV)/.titan03 $(VENV)/.megatron

# One line says what is missing, before anything is made.
define ENVIRONMENT
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "needs Python 3.11 or newer: apt-get install python3, or make PYTHON=python3.12" >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "needs venv of $(PYTHON): apt-get install python3-venv" >&2; exit 1; }
$(PYTHON) -m venv $(VENV)
endef

recommend: $(VENV)/.base
	$(BIN)/planner-cli recommend --model llama3.1-8b --gpu h100-sxm-80gb --num-gpus 8 --seq-len 8192 --global-batch-size 128

PYTEST = $(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder --durations 15 -r fEs -p tests.timing $(PYTEST_MORE)

test: $(VENV)/.test
	$(BIN)/ruff check planner api probes tests benchmarks
	$(BIN)/ruff format --check planner api probes tests benchmarks alembic setup.py
	$(BIN)/mypy
	$(PYTEST)

test-slow: $(VENV)/.test $(JUDGES)
	$(PYTEST) -m slow

$(VENV)/.base: pyproject.toml setup.py
	$(ENVIRONMENT)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.test: pyproject.toml setup.py constraints.txt
	$(ENVIRONMENT)
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs,server,postgres]'
	touch $@

# What real trainers depend on stays out of the environment: the tests run each in processes of its own. One folder for all environments
# of the same requirements and this Python.
JUDGE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/planner/$*-$(shell cksum < $*-requirements.txt | cut -d' ' -f1)-$(shell $(BIN)/python -c 'import sys; print(sys.implementation.cache_tag)')
$(JUDGES): $(VENV)/.%: %-requirements.txt $(VENV)/.test
	test -d $(JUDGE) || { rm -rf $(JUDGE).part && $(BIN)/python -m pip install --quiet --no-deps --target $(JUDGE).part --requirement $< && mv $(JUDGE).part $(JUDGE); }
	rm -rf $(VENV)/$* && ln -s $(JUDGE) $(VENV)/$*
	touch $@

benchmarks: $(VENV)/.test
	$(BIN)/python benchmarks/screening.py
	$(BIN)/planner-cli accuracy --recompute

.PHONY: recommend test test-slow benchmarks

# `make recommend` sets up and runs the main job; `make test` sets up and passes the tests of a commit, `make test-slow` the others.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# On two cores: servers, Slurm and kills wait more than they compute.
TEST_PROCESSES ?= 3
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

# Without compiled files each process of the tests compiles the checkout, and its asserts, again.
unexport PYTHONDONTWRITEBYTECODE

test: $(VENV)/.test
	$(BIN)/ruff check planner api probes tests benchmarks
	$(BIN)/ruff format --check planner api probes tests benchmarks alembic setup.py
	$(BIN)/python -m pip check
	$(BIN)/mypy > $(VENV)/types & types=$$!; $(PYTEST); tests=$$?; wait $$types; types=$$?; cat $(VENV)/types; exit $$((tests | types))

test-slow: $(VENV)/.test $(JUDGES)
	$(PYTEST) -m slow

$(VENV)/.base: pyproject.toml setup.py
	$(ENVIRONMENT)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# torch has a build for each kind of machine, so it alone is pinned without a hash.
$(VENV)/.test: pyproject.toml setup.py constraints.txt hashes/test.txt
	$(ENVIRONMENT)
	$(BIN)/python -m pip install --quiet --require-hashes --requirement hashes/test.txt
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# What real trainers depend on stays out of the environment: the tests run each in processes of its own. One folder for all environments
# of the same requirements and this Python.
JUDGE = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/planner/$*-$(shell cksum < $*-requirements.txt | cut -d' ' -f1)-$(shell $(BIN)/python -c 'import sys; print(sys.implementation.cache_tag)')
$(JUDGES): $(VENV)/.%: %-requirements.txt hashes/%.txt $(VENV)/.test
	test -d $(JUDGE) || { rm -rf $(JUDGE).part && $(BIN)/python -m pip install --quiet --no-deps --target $(JUDGE).part --require-hashes --requirement hashes/$*.txt && mv $(JUDGE).part $(JUDGE); }
	rm -rf $(VENV)/$* && ln -s $(JUDGE) $(VENV)/$*
	touch $@

# constraints.txt and the judges' files say which releases, hashes/ which files of them and of all that they bring along: for the images
# (service, probe), the tests, the judges and the audit. After a change of a pin or a dependency: make hashes.
COMPILE = $(VENV)/audit/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-emit-index-url \
	--no-header --constraint constraints.txt
SETUP = echo setuptools | $(COMPILE) - pyproject.toml --extra server --extra postgres
TORCH_NEEDS = filelock fsspec jinja2 networkx sympy
hashes: $(VENV)/.audit
	$(SETUP) --output-file hashes/service.txt
	$(SETUP) --extra probe --output-file hashes/probe.txt
	printf '%s\n' setuptools $(TORCH_NEEDS) | $(COMPILE) - pyproject.toml --extra server --extra postgres --extra dev --extra docs --output-file hashes/test.txt
	printf '%s\n' $(AUDIT) | $(COMPILE) - --output-file hashes/audit.txt
	for judge in titan titan03 megatron; do $(COMPILE) --no-deps $$judge-requirements.txt --output-file hashes/$$judge.txt || exit 1; done

# What the environment of the tests is made of: a bill of materials (CycloneDX) and the licences, in build/.
AUDIT = cyclonedx-bom pip-licenses uv
audit: $(VENV)/.test $(VENV)/.audit
	mkdir -p build
	$(VENV)/audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json $(BIN)/python
	$(VENV)/audit/bin/pip-licenses --python $(BIN)/python --from mixed --with-urls --format markdown --output-file build/licences.md

$(VENV)/.audit: hashes/audit.txt
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/python -m pip install --quiet --require-hashes --requirement $<
	touch $@

benchmarks: $(VENV)/.test
	$(BIN)/python benchmarks/screening.py
	$(BIN)/planner-cli accuracy --recompute

.PHONY: recommend test test-slow hashes audit benchmarks

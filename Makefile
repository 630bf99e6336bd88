# `make demo` and `make test` need Python 3.12 or newer (with venv) and nothing else: everything goes into .venv.
#   make test ARGS="tests/test_formats.py -x"    one file
#   make test-all                                every test, not a draw of them
#   make test EXTRA=cuda13                       with one more extra of pyproject.toml: jax for NVIDIA GPUs
#   make test-aot ARGS="-m aot -n auto"          all configurations, not a draw of them, for minutes
#   make demo PYTHON=/opt/python3.13/bin/python  name the interpreter

VENV ?= .venv
ARGS ?=
EXTRA ?=
BUILD ?=
PYTHON ?=

pythons := $(or $(PYTHON),python3.12 python3 python3.13 python3.14 python)
bin := $(VENV)/bin
extra := $(if $(EXTRA),-$(EXTRA))
comma := ,
# Without compiling all modules to bytecode: Python does so for the few that are imported, when they are.
pip_install := -m pip install --quiet --disable-pip-version-check --no-compile

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-all test-oldest test-wheel test-aot test-cuda12 test-sanitized lint format docs docs-serve bench clean

help:
	@echo "make demo     generate from the small model that ships here, on this machine"
	@echo "make test     run a case of every test, others each time"
	@echo "make test-all run all tests"
	@echo "make test-oldest  run a part of them with the oldest versions of dependencies that are allowed"
	@echo "make test-wheel   build the wheel, and run it with the oldest and the newest jax"
	@echo "make test-aot compile kernels for a GPU that is not there, and read what the compiler reports"
	@echo "make test-cuda12  compile kernels with jax's plugin for CUDA 12"
	@echo "make test-sanitized  the kernels in C++ under ASan, UBSan and TSan"
	@echo "make lint     ruff and pyright"
	@echo "make format   let ruff rewrite what it can"
	@echo "make docs     build the site into build/site, and check its links"
	@echo "make docs-serve  show the site on this machine, rebuilt when a page changes"
	@echo "make bench    time one layer against the machine's own limits"
	@echo "make clean    remove what was built; 'rm -r $(VENV)' removes the environment"

demo: $(VENV)/installed-hf$(extra)
	$(bin)/jmx generate $(or $(ARGS),examples/gpt_oss_demo "And God said" --temperature 0.7 --seed 2)

test: $(VENV)/installed-test$(extra)
	$(bin)/python -m pytest $(or $(ARGS),-n auto --dist loadfile --drawn --durations 20)

test-all: $(VENV)/installed-test$(extra)
	$(bin)/python -m pytest -n auto --dist loadfile $(ARGS)

# In an environment of its own: with jax's CUDA plugin in it, every program looks for a GPU, and complains without one.
# Its tests use no kernel in C++, so none is compiled: --editable would put it where that of $(VENV) may be in use.
aot := VENV=$(VENV)-aot EXTRA=aot BUILD=--config-settings=wheel.cmake=false
test-aot:
	@PYTEST_ADDOPTS='-m "aot and not slow"' $(MAKE) --no-print-directory test-all $(aot) $(if $(ARGS),,ARGS="--drawn $$(grep -l mark.aot tests/test_*.py | tr '\n' ' ')")

# Likewise with the `cuda12` extra, whose plugin and that of CUDA 13 exclude each other: 3 GB, and some minutes.
cuda12 := $(VENV)-cuda12
test-cuda12: $(VENV)/installed-test$(extra)
	@$(MAKE) --no-print-directory $(cuda12)/installed-test-cuda12 VENV=$(cuda12) EXTRA= BUILD=--config-settings=wheel.cmake=false
	JMX_CUDA12=$(cuda12) $(bin)/python -m pytest -m slow $(or $(ARGS),tests/test_aot_cuda12.py)

# What dependencies decide: arrays, modules, checkpoints, tables in a terminal, text, the server's API, pictures. The kernels in C++ are those of $(VENV).
oldest := $(VENV)-oldest
oldest_tests := $(patsubst %,tests/test_%.py,formats ffi library cutlass_handler nnx linen explain tables \
    checkpoint_orbax checkpoint_gpt_oss cli_completion chat_template harmony serving_guide serving_api plot)
test-oldest: $(VENV)/installed $(oldest)/installed-oldest
	$(oldest)/bin/python -m pytest $(or $(ARGS),-n auto --dist loadfile --drawn $(oldest_tests))

# The wheel beside the oldest and the newest jax, whose environments have all else that it needs, and no compiler in PATH.
# CUTLASS names a library that `jmx build cutlass` compiled, whose handlers are then registered, too.
wheel := build/wheel
test-wheel: $(VENV)/installed-test$(extra) $(oldest)/installed-oldest
	rm -rf $(wheel)
	$(bin)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(wheel) .
	$(bin)/python $(pip_install) --no-deps --target $(wheel)/installed $(wheel)/*.whl
	pids=; for bin in $(oldest)/bin $(bin); do \
	    PATH=$$bin JAX_PLATFORMS=cpu PYTHONPATH=$(wheel)/installed $$bin/python tests/wheel.py $(wheel)/installed $(CUTLASS) & \
	    pids="$$pids $$!"; \
	done; failed=0; for pid in $$pids; do wait $$pid || failed=1; done; exit $$failed

$(oldest)/installed-oldest: pyproject.toml tests/oldest.py | $(bin)/python
	@echo "installing the oldest versions into $(oldest)"
	@$(bin)/python -m venv $(oldest)
	@$(bin)/python tests/oldest.py > $(oldest)/requirements.txt
	@$(oldest)/bin/python $(pip_install) -r $(oldest)/requirements.txt
	@touch $@

# The tests of the kernels in C++, on kernels built to find reads and writes out of bounds, undefined behaviour and races.
# Python itself is not built so: the sanitizer's library has to be loaded before it, and its own leaks do not count.
sanitized := build/sanitized
test-sanitized: $(VENV)/installed-test$(extra)
	cmake -S cmake -B $(sanitized)/thread -DJMX_SANITIZE=thread -DPython_EXECUTABLE=$(abspath $(bin)/python)
	cmake --build $(sanitized)/thread --target check_threads --parallel
	$(sanitized)/thread/check_threads
	cmake -S cmake -B $(sanitized)/address -DJMX_SANITIZE=address,undefined -DPython_EXECUTABLE=$(abspath $(bin)/python)
	cmake --build $(sanitized)/address --target jmx_cpu --parallel
	rm -rf $(sanitized)/tree && mkdir $(sanitized)/tree && cp -r jmx jmx_command tests pyproject.toml $(sanitized)/tree
	cp $(sanitized)/address/libjmx_cpu.so $(sanitized)/tree/jmx/ffi/cpu/
	printf 'import sys\nsys.meta_path[:] = [f for f in sys.meta_path if "ScikitBuild" not in type(f).__name__]\n' \
	    > $(sanitized)/tree/sitecustomize.py  # or else the installed jmx is found first
	cd $(sanitized)/tree && PYTHONPATH=. LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
	    $(abspath $(bin)/python) -m pytest tests/test_ffi.py tests/test_cpu.py tests/test_cpu_formats.py tests/test_backends.py -k 'cpu or ffi' $(ARGS)

lint: $(VENV)/installed-dev$(extra)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/pyright

format: $(VENV)/installed-dev$(extra)
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

# With the stamp of `make lint`, so that both together install once. The notice is about a mkdocs that is not used here.
# Not --quiet: with it mkdocs neither prints warnings nor counts them, so that `strict` of mkdocs.yml would do nothing.
mkdocs := NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs
docs: $(VENV)/installed-dev$(extra)
	$(mkdocs) build --clean $(ARGS)
	@echo "open build/site/index.html"

docs-serve: $(VENV)/installed-dev$(extra)
	$(mkdocs) serve --watch jmx --watch README.md --watch benchmarks $(ARGS)

bench: $(VENV)/installed-bench$(extra)
	$(bin)/python benchmarks/layer.py $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis jmx/ffi/*/*.so jmx/ffi/jax_include
	find cmake -mindepth 1 -not -name CMakeLists.txt -delete
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -r {} +

# jmx is built and installed once: that compiles what is in C++, in an environment of its own, for a minute.
$(VENV)/installed: pyproject.toml cmake/CMakeLists.txt $(wildcard jmx/ffi/*/src/*.cc jmx/ffi/*/src/*.h jmx/ffi/include/*) | $(bin)/python
	@$(bin)/python -m pip --version >/dev/null 2>&1 || $(bin)/python -m ensurepip >/dev/null
	@echo "installing jmx into $(VENV)"
	@$(bin)/python $(pip_install) $(BUILD) --editable .
	@touch $@

# One stamp for each set of extras; the dashes between them become pip's commas. jmx itself is there by now.
$(VENV)/installed-%: $(VENV)/installed
	@echo "installing jmx-moe[$(subst -,$(comma),$*)] into $(VENV)"
	@$(bin)/python $(pip_install) 'jmx-moe[$(subst -,$(comma),$*)]'
	@touch $@

# A name can exist and not run (a pyenv shim of a version that is not selected), so each candidate is tried.
$(bin)/python:
	@for python in $(pythons); do \
	    if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then \
	        echo "making $(VENV) with $$($$python -c 'import sys; print(sys.executable)')"; \
	        $$python -m venv $(VENV); exit; \
	    fi; \
	done; \
	echo "error: no Python 3.12 or newer with venv among: $(pythons)" >&2; \
	echo "       name one with 'make PYTHON=/path/to/python3.12 ...'" >&2; exit 1

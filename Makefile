# The front door. Needs make and sh; scripts/setup.sh brings the rest.
.DEFAULT_GOAL := build
.PHONY: build install test test-sanitize test-clang test-faults parity demo bench gpu-package lint format docs clean help setup setup-lint

PREFIX ?= /usr/local
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
PYTHON ?= python3
ARGS ?=

# Used where it is there and works (a cache it cannot write would fail every compile).
ifeq ($(origin CMAKE_CXX_COMPILER_LAUNCHER),undefined)
  CCACHE := $(shell dir=$$(ccache --get-config cache_dir 2>/dev/null) && mkdir -p "$$dir/tmp" 2>/dev/null && \
    test -w "$$dir/tmp" && command -v ccache)
  ifneq ($(CCACHE),)
    export CMAKE_CXX_COMPILER_LAUNCHER := $(CCACHE)
    export CMAKE_CUDA_COMPILER_LAUNCHER := $(CCACHE)
  endif
endif

# Where the kernel places memory at random over a wide range, the sanitizers of GCC 12 do not
# find room for their shadow and stop at the start.
NO_RANDOM := $(shell setarch -R true >/dev/null 2>&1 && echo setarch -R)

build: setup build/release/build.ninja  ## build the library, the program, tests and examples (build/release)
	cmake --build --preset release -j $(JOBS)

install: build  ## install the program, its man page and completions, the library; PREFIX=/usr/local, DESTDIR
	cmake --install build/release --prefix "$(PREFIX)"

test: build  ## build, then run all tests
	ctest --preset release

test-sanitize: setup build/asan/build.ninja build/tsan/build.ninja  ## run the tests with address, undefined and thread sanitizers
	$(NO_RANDOM) cmake --build --preset asan -j $(JOBS)
	$(NO_RANDOM) ctest --preset asan
	$(NO_RANDOM) cmake --build --preset tsan -j $(JOBS)
	$(NO_RANDOM) ctest --preset tsan

test-clang: setup-lint  ## build and test with Clang, the second compiler
	cmake --preset clang -DCMAKE_CXX_COMPILER="$$(scripts/llvm.sh clang++)"
	cmake --build --preset clang -j $(JOBS)
	ctest --preset clang

test-faults: setup  ## plant faults one at a time and expect the tests to fail; ARGS="op ..." chooses
	JOBS=$(JOBS) scripts/faults.sh $(ARGS)

parity: setup build/release/build.ninja  ## compare whole models with mlx-lm, which it installs into build/parity
	scripts/parity.sh $(ARGS)
	cmake --build --preset release -j $(JOBS) --target model_tests
	rm -rf build/parity/saved && mkdir -p build/parity/saved
	MLXTAPE_PARITY_MODELS=build/parity/models MLXTAPE_PARITY_SAVED=build/parity/saved \
	  MLXTAPE_PARITY_JOBS=build/parity/jobs \
	  build/release/bin/model_tests --gtest_filter='*Parity*'
	build/parity/venv/bin/python tests/parity/reread.py build/parity/saved

demo: setup build/release/build.ninja  ## the whole job on a small model, a few minutes on two cores; build/demo/report.html; ARGS="..." is passed on
	cmake --build --preset release -j $(JOBS) --target mlxtape_cli
	build/release/bin/mlxtape demo --out build/demo $(ARGS)

bench: setup build/release/build.ninja  ## time the ops, beside PyTorch or MLX if importable; ARGS="..." is passed on
	cmake --build --preset release -j $(JOBS) --target mlxtape_cli
	@if $(PYTHON) -c 'import torch' 2>/dev/null || $(PYTHON) -c 'import mlx.core' 2>/dev/null; then \
	  set -- --peers bench/peers/cpu_peers.py --python '$(PYTHON)'; \
	else \
	  set --; \
	  echo 'bench: $(PYTHON) has neither torch nor mlx, so no peers to compare with'; \
	fi; \
	set -x; build/release/bin/mlxtape bench ops "$$@" $(ARGS)

gpu-package: build  ## tests and benchmark for a machine with an NVIDIA GPU, in build/gpu-package
	@nm -C build/release/bin/unit_tests | grep -q 'mlxtape::cuda' || \
	  { echo 'gpu-package: this build has no CUDA backend: install the CUDA toolkit (12.8 or newer), put nvcc into the PATH, make clean' >&2; exit 1; }
	rm -rf build/gpu-package && mkdir -p build/gpu-package/peers
	for program in op_tests unit_tests formats_tests model_tests mlxtape; do strip -o build/gpu-package/$$program build/release/bin/$$program || exit 1; done
	cp scripts/gpu_check.sh build/gpu-package
	cp bench/peers/*.py build/gpu-package/peers
	cp -r --parents tests/cli/*.sh tests/parity/golden tests/parity/golden_jobs examples/bytes scripts/kill_test.sh build/gpu-package

lint: setup-lint build/release/build.ninja  ## check layout, bugs, layers, tree and that headers stand alone
	JOBS=$(JOBS) scripts/lint.sh

format: setup-lint  ## lay out all C++ files
	scripts/lint.sh --fix-format

docs: setup build/release/build.ninja  ## write docs/ops.md anew from the op headers and the build
	cmake --build --preset release -j $(JOBS) --target mlxtape_cli
	cmake -DROOT=. -DPROGRAM=build/release/bin/mlxtape -DOUTPUT=docs/ops.md -P cmake/ops_doc.cmake

clean:  ## remove build/
	rm -rf build

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-22s%s\n", $$1, $$2 }'

setup:
	@scripts/setup.sh
setup-lint:
	@scripts/setup.sh lint

# The build regenerates itself after this; the presets are the one thing it does not watch.
build/%/build.ninja: CMakePresets.json | setup
	cmake --preset $*
	@touch $@

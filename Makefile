# The front door. Needs make and sh; scripts/setup.sh brings the rest.
.DEFAULT_GOAL := build
.PHONY: build program install test test-sanitize test-clang test-arm mac-link test-faults fuzz parity demo bench gpu-package lint format docs times clean help setup setup-program setup-lint setup-fuzz configure configure-tests

PREFIX ?= /usr/local
JOBS ?= $(shell nproc 2>/dev/null || sysctl -n hw.logicalcpu 2>/dev/null || echo 2)
PYTHON ?= python3
ARGS ?=

# Used where it is there and works (a cache it cannot write would fail every compile).
ifeq ($(origin CMAKE_CXX_COMPILER_LAUNCHER),undefined)
  CCACHE := $(shell dir=$$(ccache --get-config cache_dir 2>/dev/null) && mkdir -p "$$dir/tmp" 2>/dev/null && \
    test -w "$$dir/tmp" && command -v ccache)
  ifneq ($(CCACHE),)
    export CMAKE_CXX_COMPILER_LAUNCHER := $(CCACHE)
    export CMAKE_CUDA_COMPILER_LAUNCHER := $(CCACHE)
    # Without it nothing that uses precompiled headers is cached.
    export CCACHE_SLOPPINESS := pch_defines,time_macros
  endif
endif

# Where the kernel places memory at random over a wide range, the sanitizers of GCC 12 do not
# find room for their shadow and stop at the start.
NO_RANDOM := $(shell setarch -R true >/dev/null 2>&1 && echo setarch -R)

build: configure-tests  ## build the library, the program, tests and examples (build/release)
	cmake --build --preset release -j $(JOBS)

program: configure  ## build the program alone, which needs no test library (build/release/bin/mlxtape)
	cmake --build --preset release -j $(JOBS) --target mlxtape_cli

install: configure  ## install the program, its man page and completions, the library; PREFIX=/usr/local, DESTDIR
	cmake --build --preset release -j $(JOBS)
	cmake --install build/release --prefix "$(PREFIX)"

test: build  ## build, then run all tests
	ctest --preset release

test-sanitize: setup setup-fuzz  ## run the tests with address, undefined and thread sanitizers
	for preset in asan tsan; do \
	  cmake --preset $$preset -DCMAKE_CXX_COMPILER="$$(scripts/llvm.sh clang++)" && \
	  $(NO_RANDOM) cmake --build --preset $$preset -j $(JOBS) && \
	  $(NO_RANDOM) ctest --preset $$preset || exit 1; \
	done

test-clang: setup-lint  ## build and test with Clang, the second compiler
	cmake --preset clang -DCMAKE_CXX_COMPILER="$$(scripts/llvm.sh clang++)"
	cmake --build --preset clang -j $(JOBS)
	ctest --preset clang

test-arm:  ## run the CPU kernels as 64-bit ARM has them, on an emulator: some tests of each op; ARGS=--all: all of them
	JOBS=$(JOBS) scripts/test_arm.sh $(ARGS)

mac-link:  ## compile and link the whole program for macOS on Apple silicon, on Debian, and look at what came out
	JOBS=$(JOBS) PYTHON=$(PYTHON) scripts/mac_link.sh

test-faults: setup  ## plant faults one at a time and expect the tests to fail; ARGS="op ..." chooses
	JOBS=$(JOBS) scripts/faults.sh $(ARGS)

fuzz: setup-fuzz  ## feed readers of files with what libFuzzer thinks of; ARGS="--seconds 60", "--runs 1000000", "--target json"
	cmake --preset fuzz -DCMAKE_CXX_COMPILER="$$(scripts/llvm.sh clang++)"
	cmake --build --preset fuzz -j $(JOBS)
	scripts/fuzz.sh $(ARGS)

parity: configure-tests  ## compare whole models with mlx-lm, which it installs into build/parity
	scripts/parity.sh $(ARGS)
	cmake --build --preset release -j $(JOBS) --target model_tests formats_tests
	MLXTAPE_PARITY_TOKENIZERS=build/parity/tokenizers build/release/bin/formats_tests --gtest_filter='TokenizerParity*'
	rm -rf build/parity/saved build/parity/gguf_saved && mkdir -p build/parity/saved build/parity/gguf_saved
	MLXTAPE_PARITY_MODELS=build/parity/models MLXTAPE_PARITY_SAVED=build/parity/saved \
	  MLXTAPE_PARITY_JOBS=build/parity/jobs MLXTAPE_PARITY_GGUF=build/parity/gguf \
	  MLXTAPE_PARITY_GGUF_SAVED=build/parity/gguf_saved \
	  build/release/bin/model_tests --gtest_filter='*Parity*'
	build/parity/venv/bin/python tests/parity/reread.py build/parity/saved
	build/parity/gguf-venv/bin/python tests/parity/gguf_reread.py build/parity/gguf build/parity/gguf_saved

demo: program  ## the whole job on a small model, a few minutes on two cores; build/demo/report.html; ARGS="..." is passed on
	build/release/bin/mlxtape demo --out build/demo $(ARGS)

bench: program  ## time the ops, beside PyTorch or MLX if importable; ARGS="..." is passed on
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
	for program in mlxtape-selftest unit_tests formats_tests model_tests mlxtape; do strip -o build/gpu-package/$$program build/release/bin/$$program || exit 1; done
	cp scripts/gpu_check.sh build/gpu-package
	cp bench/peers/*.py build/gpu-package/peers
	cp -r --parents tests/cli/*.sh tests/parity/golden tests/parity/golden_jobs tests/parity/golden_gguf examples/bytes scripts/kill_test.sh build/gpu-package

lint: setup-lint configure-tests  ## check layout, bugs, layers, tree and that headers stand alone
	JOBS=$(JOBS) scripts/lint.sh

format: setup-lint  ## lay out all C++ files
	scripts/lint.sh --fix-format

docs: program  ## write docs/ops.md anew from the op headers and the build
	cmake -DROOT=. -DPROGRAM=build/release/bin/mlxtape -DOUTPUT=docs/ops.md -P cmake/ops_doc.cmake

times:  ## where the time of the last builds and tests went; ARGS=50 for more rows
	@scripts/times.sh $(ARGS)

clean:  ## remove build/
	rm -rf build

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-22s%s\n", $$1, $$2 }'

setup:
	@scripts/setup.sh
setup-program:
	@scripts/setup.sh program
setup-lint:
	@scripts/setup.sh lint
setup-fuzz:
	@scripts/setup.sh fuzz

# The build regenerates itself after this; the presets are the one thing it does not watch.
build/%/build.ninja: CMakePresets.json | setup
	cmake --preset $*
	@touch $@

# build/release, with the tests once they have been asked for: until then no test library has to be there.
configure: setup-program
	@if ! [ build/release/build.ninja -nt CMakePresets.json ]; then \
	  tests=$$(sed -n 's/^MLXTAPE_BUILD_TESTS:BOOL=//p' build/release/CMakeCache.txt 2>/dev/null); \
	  cmake --preset release -DMLXTAPE_BUILD_TESTS=$${tests:-OFF} && touch build/release/build.ninja; \
	fi
configure-tests: setup build/release/build.ninja
	@grep -q '^MLXTAPE_BUILD_TESTS:BOOL=ON' build/release/CMakeCache.txt || cmake --preset release -DMLXTAPE_BUILD_TESTS=ON

#!/bin/bash
# Makes the models that model_tests compares with mlx-lm: build/parity/models and build/parity/jobs, by
# tests/parity/reference.py and reference_jobs.py in a Python environment of its own; and real tokenizers for formats_tests,
# build/parity/tokenizers, by reference_tokenizers.py in another; and GGUF files with what llama.cpp computes with them, build/parity/gguf,
# by gguf_models.py in a third. All are made once, and again when what they are made by changes.
#
#   scripts/parity.sh            the models of the full suite
#   scripts/parity.sh --hf       and what transformers computes with those in its format (installs PyTorch: large)
#   scripts/parity.sh --golden   the small models in tests/parity/golden and golden_jobs instead
#
# PYTHON names the Python (3.10 or newer) that the environment is made with.
set -euo pipefail
cd "$(dirname "$0")/.."

# The versions that the suite was tried with; other ones compute other last bits.
packages=('mlx[cpu]==0.32.4' 'mlx-lm==0.32.2')
tokenizer_packages=('tokenizers==0.23.3' 'sentencepiece==0.2.3' 'tiktoken==0.14.0' 'mistral-common==1.13.0' 'gguf==0.19.0')
gguf_packages=('gguf==0.19.0' 'xllamacpp==2026.10.11549')
hf_packages=('torch==2.15.0' 'transformers==5.22.2')

fail() {
  printf 'parity: %s\n' "$*" >&2
  exit 1
}

output=build/parity/models
jobs=build/parity/jobs
options=()
hf=0
case "${1:-}" in
  '') ;;
  --hf)
    hf=1
    packages+=("${hf_packages[@]}") ;;
  --golden)
    output=tests/parity/golden
    jobs=tests/parity/golden_jobs
    options=(--golden) ;;
  *) fail "knows --hf and --golden, got $1" ;;
esac

# install FOLDER PACKAGE...: an environment with these, made anew when they are others.
install() {
  local venv=$1
  shift
  if [ "$(cat "$venv/packages" 2>/dev/null)" = "$*" ]; then return; fi
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv" >build/parity/install.log 2>&1 ||
    fail "${PYTHON:-python3} -m venv failed (Debian: apt-get install python3-venv); build/parity/install.log says more"
  printf 'parity: installing %s\n' "$*"
  "$venv/bin/python" -m pip install "$@" >>build/parity/install.log 2>&1 ||
    fail "pip could not install $*: this needs the network; build/parity/install.log says more"
  printf '%s\n' "$*" >"$venv/packages"
}

python=build/parity/venv/bin/python
mkdir -p build/parity
install build/parity/venv "${packages[@]}"

export PYTHONDONTWRITEBYTECODE=1
made_by=$(find tests/parity -maxdepth 1 -name '*.py' ! -name '*tokenizer*' ! -name 'gguf*' | sort | xargs cat scripts/parity.sh | cksum)
if [ $output = tests/parity/golden ] || [ "$(cat $output/made_by 2>/dev/null)" != "$made_by" ]; then
  rm -rf $output $jobs
  $python tests/parity/reference.py $output "${options[@]}"
  $python tests/parity/reference_jobs.py $jobs 2>build/parity/jobs.log ||
    fail "reference_jobs.py failed; build/parity/jobs.log says more"
  if [ $output != tests/parity/golden ]; then printf '%s\n' "$made_by" >$output/made_by; fi
fi
# Real tokenizers: half a gigabyte of packages and of what is made of them, so for the full suite alone.
if [ $output != tests/parity/golden ]; then
  tokenizers=build/parity/tokenizers
  install build/parity/tokenizer-venv "${tokenizer_packages[@]}"
  made_by=$(cat tests/parity/*tokenizer*.py | cksum)
  if [ "$(cat $tokenizers/made_by 2>/dev/null)" != "$made_by" ]; then
    build/parity/tokenizer-venv/bin/python tests/parity/reference_tokenizers.py $tokenizers >build/parity/tokenizers.log 2>&1 ||
      fail "reference_tokenizers.py failed; build/parity/tokenizers.log says more"
    printf '%s\n' "$made_by" >$tokenizers/made_by
  fi
fi
if [ $output = tests/parity/golden ]; then gguf=tests/parity/golden_gguf; else gguf=build/parity/gguf; fi
install build/parity/gguf-venv "${gguf_packages[@]}"
made_by=$(cat tests/parity/gguf*.py | cksum)
if [ $output = tests/parity/golden ] || [ "$(cat $gguf/made_by 2>/dev/null)" != "$made_by" ]; then
  rm -rf $gguf
  build/parity/gguf-venv/bin/python tests/parity/gguf_models.py $gguf "${options[@]}" >build/parity/gguf.log 2>&1 ||
    fail "gguf_models.py failed; build/parity/gguf.log says more"
  if [ $output != tests/parity/golden ]; then printf '%s\n' "$made_by" >$gguf/made_by; fi
fi
if [ $hf = 1 ]; then $python tests/parity/reference_hf.py $output; fi

#!/bin/bash
# Makes the models that model_tests compares with mlx-lm: build/parity/models and build/parity/jobs, by
# tests/parity/reference.py and reference_jobs.py in a Python environment of its own. Both are made once, and again when what they are made by changes.
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

venv=build/parity/venv
python=$venv/bin/python
mkdir -p build/parity
if [ "$(cat $venv/packages 2>/dev/null)" != "${packages[*]}" ]; then
  rm -rf $venv
  "${PYTHON:-python3}" -m venv $venv >build/parity/install.log 2>&1 ||
    fail "${PYTHON:-python3} -m venv failed (Debian: apt-get install python3-venv); build/parity/install.log says more"
  printf 'parity: installing %s\n' "${packages[*]}"
  $python -m pip install "${packages[@]}" >>build/parity/install.log 2>&1 ||
    fail "pip could not install ${packages[*]}: this needs the network; build/parity/install.log says more"
  printf '%s\n' "${packages[*]}" >$venv/packages
fi

export PYTHONDONTWRITEBYTECODE=1
made_by=$(cat tests/parity/*.py scripts/parity.sh | cksum)
if [ $output = tests/parity/golden ] || [ "$(cat $output/made_by 2>/dev/null)" != "$made_by" ]; then
  rm -rf $output $jobs
  $python tests/parity/reference.py $output "${options[@]}"
  $python tests/parity/reference_jobs.py $jobs 2>build/parity/jobs.log ||
    fail "reference_jobs.py failed; build/parity/jobs.log says more"
  if [ $output != tests/parity/golden ]; then printf '%s\n' "$made_by" >$output/made_by; fi
fi
if [ $hf = 1 ]; then $python tests/parity/reference_hf.py $output; fi

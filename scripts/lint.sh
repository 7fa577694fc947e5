#!/bin/bash
# What `make lint` does, in the order of what is quickest to repair. All steps run; one that fails
# makes the whole fail. Needs a configured build/release (for the compile commands).
#
#   scripts/lint.sh --fix-format    only lays out the files
#
# Formatting is checked with clang-format 19 alone: versions disagree on details, and a check that
# depends on the machine is none. Any version of clang-tidy will do.
set -euo pipefail
cd "$(dirname "$0")/.."

jobs=${JOBS:-2}
build=${MLXTAPE_LINT_BUILD:-build/release}
failed=()

step() {
  local name=$1 start=$SECONDS
  shift
  printf '== %s\n' "$name"
  if "$@"; then
    printf -- '-- %s: ok (%d s)\n' "$name" $((SECONDS - start))
  else
    printf -- '-- %s: FAILED (%d s)\n' "$name" $((SECONDS - start))
    failed+=("$name")
  fi
}

in_git() { git rev-parse --is-inside-work-tree >/dev/null 2>&1; }

# Every file of the tree, tracked or about to be; without git, all but build folders.
tree_files() {
  if in_git; then
    git ls-files --cached --others --exclude-standard | while read -r file; do
      if [ -f "$file" ]; then printf '%s\n' "$file"; fi
    done
  else
    find . -name 'build*' -prune -o -name '.?*' -prune -o -type f -print | sed 's|^\./||'
  fi
}

cpp_files() { tree_files | grep -E '\.(h|cpp|cu|cuh|mm|metal)$' | sort; }

format() {
  local tool version
  tool=$(scripts/llvm.sh clang-format) || { echo "clang-format is not installed"; return 1; }
  version=$("$tool" --version | sed 's/.*version \([0-9]*\).*/\1/')
  if [ "$version" != 19 ]; then
    echo "skipped: $tool is version $version, and only 19 counts"
    return 0
  fi
  cpp_files | tr '\n' '\0' | xargs -0 -r -n 8 -P "$jobs" "$tool" "$@"
}

check_format() {
  local found
  found=$(jobs=1 format --dry-run 2>&1)
  if ! grep -q 'clang-format-violations' <<<"$found"; then
    printf '%s\n' "${found:-all files}"
    return 0
  fi
  echo "not laid out as .clang-format says (make format repairs it); lines per file:"
  sed -n 's/^\([^: ]*\):\([0-9]*\):.*clang-format-violations.*/\1 \2/p' <<<"$found" | sort -u -k 1,1 -k 2,2n |
    awk '{ if (!($1 in n)) first[$1] = $2; n[$1]++ }
         END { for (f in n) printf "  %s: %d, from line %d\n", f, n[f], first[f] }' | sort
  return 1
}

# The files that differ from where this work started: origin/main if there is one, else the commit
# before, else (nothing to compare with) all.
changed_files() {
  local base=
  if in_git; then
    if git rev-parse -q --verify origin/main >/dev/null &&
      [ "$(git rev-parse origin/main)" != "$(git rev-parse HEAD)" ]; then
      base=$(git merge-base origin/main HEAD || true)
    elif git rev-parse -q --verify HEAD~1 >/dev/null; then
      base=HEAD~1
    fi
  fi
  if [ -n "$base" ]; then
    echo "changed since $base ($(git rev-parse --short "$base"))" >&2
    { git diff --name-only "$base" -- && git ls-files --others --exclude-standard; } | sort -u
  elif [ "${CI:-}" = true ] && in_git && git rev-parse -q --verify HEAD >/dev/null; then
    echo "no base to compare with: the files of the last commit" >&2
    git diff-tree --root -r --no-commit-id --name-only HEAD
  else
    echo "no base to compare with: all files" >&2
    tree_files
  fi
}

# Only what the build compiles has compile commands. The path-walking analyzer stays away from
# kernels and tests: unrolled vector code and assertion macros cost it a minute per file and gave
# nothing; sanitizers watch both. For kernels one SIMD target stands for all.
tidy() {
  local tool files compiled
  tool=$(scripts/llvm.sh clang-tidy) || { echo "clang-tidy is not installed"; return 1; }
  compiled=$(sed -n 's/^ *"file": "\(.*\)",*$/\1/p' "$build/compile_commands.json" | sort -u)
  files=$(changed_files | grep -E '\.cpp$' | while read -r file; do
    if [ -f "$file" ] && grep -qxF "$PWD/$file" <<<"$compiled"; then printf '%s\n' "$file"; fi
  done) || true
  if [ -z "$files" ]; then
    echo "no compiled file changed"
    return 0
  fi
  echo "$(wc -l <<<"$files") files"
  # shellcheck disable=SC2016  # expanded by the inner shell
  tr '\n' '\0' <<<"$files" | xargs -0 -n 1 -P "$jobs" bash -c '
    case $2 in
      *.cpu.cpp | *_test.cpp | tests/*) set -- "$@" --checks=-clang-analyzer-* ;;
    esac
    out=$("$0" -p "$1" --quiet --extra-arg=-DHWY_COMPILE_ONLY_STATIC \
      --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-ignored-gch "${@:2}" 2>&1)
    status=$?
    grep -vE "^[0-9]+ (warning|error).* generated\.$|^Error while processing|^$" <<<"$out"
    exit $status' "$tool" "$build"
}

headers_alone() {
  cmake --build "$build" -j "$jobs" --target all_verify_interface_header_sets
}

if [ "${1:-}" = --fix-format ]; then
  format -i
  exit
fi

step "format" check_format
step "layers" cmake -DROOT="$PWD" -P cmake/check_layers.cmake
step "tree" cmake -DROOT="$PWD" -P cmake/check_tree.cmake
step "public headers compile alone" headers_alone
step "clang-tidy" tidy

if [ ${#failed[@]} -ne 0 ]; then
  printf 'lint: failed: %s\n' "${failed[*]}"
  exit 1
fi
echo "lint: clean"

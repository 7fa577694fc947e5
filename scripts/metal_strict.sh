#!/bin/sh
# Reads kernels for Metal with Clang in its mode for OpenCL C++, in which address spaces are types: what Apple's compiler
# refuses there is refused here. The build writes the texts (metal_bind strict, cmake/metal.cmake).
#
#   scripts/metal_strict.sh FILE.clcpp...
#   scripts/metal_strict.sh --planted FILE.metal FILE.clcpp    lines with "// refused" are, and no others
#
# Without Clang it ends with 77: skipped.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
tool=$("$root/scripts/llvm.sh" clang++) || { echo "metal_strict: clang++ is not installed: skipped"; exit 77; }

read_one() {
  "$tool" -x clcpp -cl-std=clc++2021 -cl-no-stdinc -fsyntax-only -ferror-limit=0 -Wno-unknown-attributes -I"$root/src" "$1" 2>&1
}

if [ "${1:-}" = --planted ]; then
  said=$(read_one "$3" || true)
  wanted=$(grep -n '// refused' "$2" | cut -d: -f1)
  got=$(printf '%s\n' "$said" | sed -n "s|^.*$(basename "$2"):\([0-9]*\):[0-9]*: error:.*|\1|p" | sort -nu)
  [ -n "$wanted" ] || { echo "metal_strict: no line of $2 is to be refused"; exit 1; }
  if [ "$wanted" != "$got" ]; then
    printf 'metal_strict: %s: refused must be lines\n%s\ngot\n%s\n%s\n' "$2" "$(echo $wanted)" "$(echo $got)" "$said"
    exit 1
  fi
  exit 0
fi

[ $# -gt 0 ] || { echo "metal_strict: no text given"; exit 1; }
failed=0
for text in "$@"; do
  said=$(read_one "$text") || failed=1
  if [ -n "$said" ]; then
    printf '%s\n' "$said"
    failed=1
  fi
done
exit $failed

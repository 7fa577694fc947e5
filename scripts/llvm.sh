#!/bin/sh
# scripts/llvm.sh <tool> : the name under which an LLVM tool is found here. Version 19 if there is
# one, because its formatting is the one that counts, else the newest. Nothing and 1 if none.
set -eu
for version in -19 -30 -29 -28 -27 -26 -25 -24 -23 -22 -21 -20 '' -18 -17 -16 -15 -14; do
  if command -v "$1$version" >/dev/null 2>&1; then
    printf '%s\n' "$1$version"
    exit 0
  fi
done
exit 1

#!/bin/sh
# add_op_test.sh <source dir> <scratch dir> <compiler>
#
# Adds an op to a copy of the tree as CONTRIBUTING.md tells it: the files under dampen/ and one line
# in ops.list. The build must take it up from there, its tests must pass, and nothing else may have
# changed.
set -eu
source=$1
work=$2
cxx=$3
here=$(cd "$(dirname "$0")" && pwd)
copy=$work/tree

fail() {
  echo "add_op_test: $*" >&2
  exit 1
}
sums() { (cd "$copy" && find . -type f -exec cksum {} + | sort -k 3); }

rm -rf "$work"
mkdir -p "$copy"
for entry in CMakeLists.txt CMakePresets.json Makefile .clang-format .clang-tidy .editorconfig \
  bench cmake docs examples include lab scripts src tests; do
  if [ -e "$source/$entry" ]; then cp -R "$source/$entry" "$copy/$entry"; fi
done

sums >"$work/before"
cp -R "$here/dampen/." "$copy"
list=src/ops/ops.list
{ sed -n '/^#/p' "$source/$list"; { sed '/^#/d' "$source/$list"; echo dampen; } | LC_ALL=C sort; } \
  >"$copy/$list"
sums >"$work/after"

diff "$work/before" "$work/after" | sed -n 's/^> [0-9]* [0-9]* \.\///p' | LC_ALL=C sort >"$work/touched"
LC_ALL=C sort >"$work/places" <<'PLACES'
include/mlxtape/ops/dampen.h
src/ops/dampen/dampen.cpp
src/ops/dampen/dampen.cpu.cpp
src/ops/dampen/dampen_args.h
src/ops/dampen/dampen_test.cpp
src/ops/ops.list
PLACES
diff "$work/places" "$work/touched" || fail "an op lives in these places and in no other"
[ "$(diff "$source/$list" "$copy/$list" | grep -c '^[<>]')" = 1 ] || fail "ops.list: one line, no more"

cmake -DROOT="$copy" -P "$copy/cmake/check_layers.cmake" || fail "the new op breaks a layer"
cmake -DROOT="$copy" -P "$copy/cmake/check_tree.cmake" || fail "the new op breaks a rule of the tree"

# Nothing is measured here, so build what is quickest to build: no optimisation, one SIMD target.
if command -v ccache >/dev/null 2>&1; then
  launcher=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}
else
  launcher=
fi
cmake -S "$copy" -B "$work/build" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" -DMLXTAPE_CUDA=OFF \
  -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" -DCMAKE_BUILD_TYPE=Debug \
  -DCMAKE_CXX_FLAGS_DEBUG="-O0 -DHWY_COMPILE_ONLY_STATIC" >"$work/configure.log" ||
  fail "does not configure with the new op"
cmake --build "$work/build" --target op_tests >"$work/build.log" ||
  { tail -n 40 "$work/build.log"; fail "does not build with the new op"; }

"$work/build/bin/op_tests" --gtest_filter='*Dampen*' >"$work/test.log" ||
  { tail -n 40 "$work/test.log"; fail "the new op's tests do not pass"; }
# A filter that finds nothing passes too.
grep -q '^\[  PASSED  \] [1-9]' "$work/test.log" || fail "the new op's tests were not found"
tail -n 3 "$work/test.log"

sums >"$work/built"
diff "$work/after" "$work/built" || fail "building changed the source tree"
rm -rf "$work"

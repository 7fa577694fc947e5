#!/bin/sh
# add_op_test.sh <source dir> <scratch dir> <compiler> <build dir>
#
# Adds an op to a copy of the tree as CONTRIBUTING.md tells it: the files under dampen/ and one line
# in ops.list. The build must take it up from there, its tests must pass, and nothing else may have
# changed. Only what the new op brings is compiled; the rest is the library of the build given.
set -eu
source=$1
work=$2
cxx=$3
build=$4
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
src/ops/dampen/dampen_bench.cpp
src/ops/dampen/dampen_test.cpp
src/ops/ops.list
PLACES
diff "$work/places" "$work/touched" || fail "an op lives in these places and in no other"
[ "$(diff "$source/$list" "$copy/$list" | grep -c '^[<>]')" = 1 ] || fail "ops.list: one line, no more"

cmake -DROOT="$copy" -P "$copy/cmake/check_layers.cmake" || fail "the new op breaks a layer"
cmake -DROOT="$copy" -P "$copy/cmake/check_tree.cmake" || fail "the new op breaks a rule of the tree"

cmake -S "$copy" -B "$work/build" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" -DMLXTAPE_CUDA=OFF \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >"$work/configure.log" || fail "does not configure with the new op"
ninja -C "$work/build" -n op_tests mlxtape_bench >"$work/plan.log" ||
  { tail -n 5 "$work/plan.log"; fail "the build cannot be planned with the new op"; }

# The op's own objects, the two lists made from ops.list, and what tests stand on.
ninja -C "$work/build" -t targets all | sed -n 's/^\(.*\.o\): .*/\1/p' | grep -v /kernel_tests.dir/ >"$work/objects"
for file in dampen.cpp dampen.cpu.cpp dampen_bench.cpp dampen_test.cpp register_all.cpp bench_all.cpp; do
  grep -q "/$file\.o\$" "$work/objects" || fail "the build does not compile $file"
done
grep -E '/(dampen[a-z_]*(\.cpu)?|register_all|bench_all)\.cpp\.o$|/mlxtape_(support|cases)\.dir/|/op_tests\.dir/support/' \
  "$work/objects" >"$work/needed"
# shellcheck disable=SC2046  # one word per object
ninja -C "$work/build" $(cat "$work/needed") >"$work/build.log" ||
  { tail -n 40 "$work/build.log"; fail "does not build with the new op"; }
nm -C "$work/build/$(grep '/bench_all\.' "$work/needed")" | grep -q ' U mlxtape::bench::dampen_bench_cases' ||
  fail "the benchmark has no rows of the new op"

# Its list of kernels comes before the library's own, which is then left out of the link.
libraries=$(ninja -C "$build" -t commands op_tests | tail -n 1 | tr -d '"' | tr ' ' '\n' |
  grep -E '^(-L|-l|-fuse-ld=|-static-lib|/.*\.(a|so)$)')
# shellcheck disable=SC2046,SC2086  # one word per object and library
(cd "$work/build" && mkdir -p bin &&
  "$cxx" $(grep -v -E '_bench\.cpp|/bench_all\.' "$work/needed") "$build/src/libmlxtape.a" $libraries -o bin/op_tests) ||
  fail "does not link with the new op"

"$work/build/bin/op_tests" --gtest_filter='*Dampen*' >"$work/test.log" ||
  { tail -n 40 "$work/test.log"; fail "the new op's tests do not pass"; }
# A filter that finds nothing passes too.
grep -q '^\[  PASSED  \] [1-9]' "$work/test.log" || fail "the new op's tests were not found"
tail -n 3 "$work/test.log"

sums >"$work/built"
diff "$work/after" "$work/built" || fail "building changed the source tree"
rm -rf "$work"

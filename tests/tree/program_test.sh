#!/bin/sh
# program_test.sh <source dir> <scratch dir> <compiler> [<program> <most MiB>]
#
# The program, its benchmark included, is built where no test library is, and from no file of the tests. Without symbols the
# one that was built is no larger than this: a kernel's template that is compiled for a hundred types is seen here.
set -eu
source=$1
work=$2
cxx=$3

fail() {
  echo "program_test: $*" >&2
  exit 1
}

rm -rf "$work"
mkdir -p "$work"
# A package that is disabled and asked for all the same is an error.
cmake -S "$source" -B "$work/build" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" -DMLXTAPE_CUDA=OFF -DMLXTAPE_BUILD_TESTS=OFF \
  -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON -DCMAKE_DISABLE_FIND_PACKAGE_rapidcheck=ON \
  -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON >"$work/configure.log" 2>&1 ||
  { tail -n 20 "$work/configure.log"; fail "does not configure without the test libraries"; }
ninja -C "$work/build" -t commands mlxtape_cli >"$work/commands"
grep -q 'softmax_bench\.cpp' "$work/commands" || fail "the program has no benchmark"
if grep -nE 'gtest|gmock|rapidcheck|_test\.cpp' "$work/commands" || grep -nF "$source/tests/" "$work/commands"; then
  fail "the program is made from tests"
fi

if [ $# -gt 3 ]; then
  [ -e "$4" ] || fail "$4 is not built"
  strip -o "$work/stripped" "$4"
  size=$(wc -c <"$work/stripped")
  # fits <MiB>
  fits() { [ "$size" -le $(($1 * 1048576)) ]; }
  if fits 1; then fail "$4 without symbols has $size bytes: is it the program?"; fi
  fits "$5" || fail "$4 without symbols has $size bytes, at most $5 MiB"
fi
rm -rf "$work"

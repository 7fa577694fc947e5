#!/bin/sh
# add_architecture_test.sh <source dir> <scratch dir> <compiler> <build dir>
#
# Adds an architecture to a copy of the tree: one file and one line in architectures.list. The library must then train, run,
# save, load, quantise and tune such models, and generate with the engine. Only the new file and the list are compiled; the rest is the library given.
set -eu
source=$1
work=$2
cxx=$3
build=$4
here=$(cd "$(dirname "$0")" && pwd)
copy=$work/tree

fail() {
  echo "add_architecture_test: $*" >&2
  exit 1
}

rm -rf "$work"
mkdir -p "$copy"
for entry in CMakeLists.txt CMakePresets.json bench cmake docs examples include src tests; do
  cp -R "$source/$entry" "$copy/$entry"
done
cp -R "$here/architecture/src" "$copy"
echo fictional >>"$copy/src/models/architectures/architectures.list"
[ "$(diff -r "$source/src" "$copy/src" | grep -c '^Only in\|^diff ')" = 2 ] ||
  fail "an architecture is one file and one line"
cmake -DROOT="$copy" -P "$copy/cmake/check_layers.cmake" || fail "the new architecture breaks a layer"
cmake -DROOT="$copy" -P "$copy/cmake/check_tree.cmake" || fail "the new architecture breaks a rule of the tree"

cmake -S "$copy" -B "$work/build" -G Ninja -DCMAKE_CXX_COMPILER="$cxx" -DMLXTAPE_CUDA=OFF -DMLXTAPE_BUILD_TESTS=OFF \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >"$work/configure.log" || fail "does not configure"
ninja -C "$work/build" -t targets all | sed -n 's/^\(.*\/\(fictional\|architectures\)\.cpp\.o\): .*/\1/p' >"$work/needed"
[ "$(wc -l <"$work/needed")" = 2 ] || fail "the build does not compile the new file"
# shellcheck disable=SC2046  # one word per object
ninja -C "$work/build" $(cat "$work/needed") >"$work/build.log" || { tail -n 40 "$work/build.log"; fail "does not build"; }

# Its list comes before the library's own, which is then left out of the link.
libraries=$(ninja -C "$build" -t commands mlxtape_cli | tail -n 1 | tr -d '"' | tr ' ' '\n' |
  grep -E '^(-L|-l|-fuse-ld=|-static-lib|/.*\.(a|so)$)')
# shellcheck disable=SC2046,SC2086  # one word per object and library
(cd "$work/build" && "$cxx" -std=c++20 -O1 -I"$copy/include" "$here/architecture/check.cpp" $(cat "$work/needed") \
  "$build/src/libmlxtape.a" $libraries -pthread -o check) || fail "does not link"
"$work/build/check" "$work" || fail "the new architecture does not do what every one does"
rm -rf "$work"

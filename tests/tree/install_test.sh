#!/bin/sh
# install_test.sh <build dir> <scratch dir> <compiler>
#
# Installs the build, then builds and runs a user's program against nothing but the installed files:
# through CMake, and through pkg-config where there is one.
set -eu
build=$1
work=$2
cxx=$3
here=$(cd "$(dirname "$0")" && pwd)
prefix=$work/prefix

fail() {
  echo "install_test: $*" >&2
  exit 1
}

rm -rf "$work"
mkdir -p "$work"
cmake --install "$build" --prefix "$prefix" >"$work/install.log" || fail "cmake --install failed"

# What the library is built with must not be asked of its users.
if grep -rnE 'hwy|CLI11|[Gg][Tt]est|rapidcheck|nlohmann' "$prefix/include" "$prefix"/lib*/cmake \
  "$prefix"/lib*/*/cmake 2>/dev/null; then
  fail "an installed file asks for a library that is only needed to build"
fi
config=$(find "$prefix" -name 'mlxtapeTargets*.cmake')
# shellcheck disable=SC2086  # several files
if grep -nE 'mlxtape_[a-z]|-W|-march|fp-contract|sanitize' $config; then
  fail "the exported target names a layer or one of our flags"
fi
if grep -rn "$build" "$prefix"/lib*/cmake "$prefix"/lib*/*/cmake 2>/dev/null; then
  fail "an installed file names the build folder"
fi

# The package of another version must be refused, ours accepted.
cmake -S "$here/consumer" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" \
  -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF >"$work/configure.log" ||
  fail "a user's project does not configure"
cmake --build "$work/build" || fail "a user's project does not build"
"$work/build/consumer" || fail "a user's program does not run"
"$prefix/bin/mlxtape" --version || fail "the installed program does not start"
"$prefix/bin/mlxtape" selftest --filter 'SoftmaxCheck*' || fail "the installed selftest does not run"
for file in man/man1/mlxtape.1 bash-completion/completions/mlxtape zsh/site-functions/_mlxtape \
  fish/vendor_completions.d/mlxtape.fish; do
  [ -s "$prefix/share/$file" ] || fail "share/$file is not installed"
done

# Another major version, a later minor one, and an earlier one, whose API may have been another.
for version in 1.0 0.2 0.0; do
  mkdir "$work/other"
  sed "s/mlxtape 0.1/mlxtape $version/" "$here/consumer/CMakeLists.txt" >"$work/other/CMakeLists.txt"
  if cmake -S "$work/other" -B "$work/other/build" -DCMAKE_PREFIX_PATH="$prefix" \
    -DCMAKE_CXX_COMPILER="$cxx" >/dev/null 2>&1; then
    fail "find_package(mlxtape $version) accepts another version"
  fi
  rm -r "$work/other"
done

if command -v pkg-config >/dev/null 2>&1; then
  PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name mlxtape.pc)")
  export PKG_CONFIG_PATH
  # shellcheck disable=SC2046  # one word per flag
  "$cxx" -std=c++20 "$here/consumer/main.cpp" -o "$work/with_pkg_config" \
    $(pkg-config --cflags --libs mlxtape) || fail "a user's program does not build with pkg-config"
  "$work/with_pkg_config"
else
  echo "no pkg-config here: not tried"
fi
rm -rf "$work"

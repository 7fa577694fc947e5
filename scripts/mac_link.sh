#!/bin/sh
# `make mac-link`: the whole program for macOS 14 on Apple silicon, compiled and linked on Debian: build/mac/bin/mlxtape.
# Nothing runs it here. What came out is looked at by scripts/check_macho.py.
#
#   scripts/mac_link.sh
#
# Zig's Python package brings a compiler that makes programs for macOS, with Apple's headers and a C++ library. Of the
# libraries two are headers alone and come from Debian's packages; two are built from the sources of such packages.
set -eu
cd "$(dirname "$0")/.."
jobs=${JOBS:-2}
python=${PYTHON:-python3}

fail() { printf 'mac_link: %s\n' "$*" >&2; exit 1; }

[ "$(uname -s)" != Darwin ] || fail "this machine is a Mac: make program"
command -v apt-get >/dev/null || fail "needs apt-get: it takes libraries from Debian's packages and their sources"
command -v "$python" >/dev/null || fail "needs $python: apt-get install python3-venv, or PYTHON=... make mac-link"
scripts/setup.sh mac

work=$PWD/build/mac-packages
compiler='ziglang==0.17.0'  # what this was tried with
target='aarch64-macos.14.0'
headers='libhwy-dev libcli11-dev'
libraries='pcre2 utf8proc'

# done_with PART WHAT: whether the part was made of just that.
done_with() { [ "$(cat "$work/$1.done" 2>/dev/null)" = "$2" ]; }

# ---- compiler ----

log=$work/log
if ! done_with compiler "$compiler $target"; then
  rm -rf "$work"
  mkdir -p "$work"
  printf 'mac_link: installing %s\n' "$compiler"
  "$python" -m venv "$work/venv" >"$log" 2>&1 ||
    fail "$python -m venv failed (Debian: apt-get install python3-venv); $log says more"
  "$work/venv/bin/python" -m pip install "$compiler" >>"$log" 2>&1 ||
    fail "pip could not install $compiler: this needs the network; $log says more"
  zig=$("$work/venv/bin/python" -c 'import os, ziglang; print(os.path.join(os.path.dirname(ziglang.__file__), "zig"))')
  mkdir "$work/bin"
  # tool NAME WORDS: build tools, and ccache above all, want one word for a compiler.
  tool() {
    printf '#!/bin/sh\n# %s\nexport ZIG_GLOBAL_CACHE_DIR="%s" ZIG_LOCAL_CACHE_DIR="%s"\nexec "%s" %s "$@"\n' \
      "$compiler" "$work/cache" "$work/cache" "$zig" "$2" >"$work/bin/$1"
    chmod +x "$work/bin/$1"
  }
  tool clang "cc -target $target"
  tool clang++ "c++ -target $target"
  tool ar ar
  tool ranlib ranlib
  printf '%s' "$compiler $target" >"$work/compiler.done"
fi

# ---- libraries: unpacked and built beside; the system's own packages and lists stay as they are ----

root=$work/root
if ! done_with libraries "$headers $libraries"; then
  rm -rf "$work/libraries.done" "$work/apt" "$work/sources" "$root"
  mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/apt/parts" "$work/sources" "$root"
  # The system's own places, asked for sources too.
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
    sed -n '/^deb /{p;s/^deb /deb-src /p;}' >"$work/apt/sources.list"
  for file in /etc/apt/sources.list.d/*.sources; do
    if [ -e "$file" ]; then sed 's/^Types:.*/Types: deb deb-src/' "$file" >"$work/apt/parts/${file##*/}"; fi
  done
  : >"$work/apt/status"
  cat >"$work/apt/apt.conf" <<CONFIG
APT::Sandbox::User "root";
Acquire::Retries "3";
Dir::State "$work/apt";
Dir::State::Lists "$work/apt/lists";
Dir::State::Status "$work/apt/status";
Dir::Cache "$work/apt/cache";
Dir::Etc::SourceList "$work/apt/sources.list";
Dir::Etc::SourceParts "$work/apt/parts";
CONFIG
  printf 'mac_link: unpacking %s, building %s\n' "$headers" "$libraries"
  export APT_CONFIG="$work/apt/apt.conf"
  # A source that has nothing of ours must not stop what the others can deliver.
  apt-get -q update >"$log" 2>&1 || printf 'mac_link: apt-get update reported errors; trying with what is known\n'
  # shellcheck disable=SC2086  # one word per package; CMake's file for Highway asks for the shared library
  (cd "$work/sources" && apt-get -q download $headers \
    "$(apt-cache depends libhwy-dev | sed -n 's/^ *Depends: \(libhwy[0-9a-z.]*\)$/\1/p')" &&
    apt-get -q source --download-only --tar-only $libraries) >>"$log" 2>&1 ||
    fail "apt-get could not download $headers and the sources of $libraries: this needs the network; $log says more"
  unset APT_CONFIG
  for deb in "$work"/sources/*.deb; do dpkg -x "$deb" "$root"; done
  for name in $libraries; do
    mkdir "$work/sources/$name"
    tar -xf "$work/sources/$name"_*.orig.tar.* -C "$work/sources/$name" --strip-components=1
    # Options of one are unknown to the other, which is meant.
    { cmake -G Ninja -S "$work/sources/$name" -B "$work/sources/$name/build" --no-warn-unused-cli \
        -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/arm64-macos.cmake" -DMLXTAPE_MAC_PACKAGES="$work" \
        -DCMAKE_INSTALL_PREFIX="$root/usr" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DPCRE2_SUPPORT_JIT=ON -DPCRE2_BUILD_TESTS=OFF -DPCRE2_BUILD_PCRE2GREP=OFF &&
      cmake --build "$work/sources/$name/build" -j "$jobs" &&
      cmake --install "$work/sources/$name/build"; } >"$log" 2>&1 || fail "$name could not be built; $log says more"
  done
  printf '%s' "$headers $libraries" >"$work/libraries.done"
fi

# ---- the program ----

cmake --preset mac -DMLXTAPE_MAC_PACKAGES="$work" -Dhwy_DIR="$(echo "$root"/usr/lib/*/cmake/hwy)"
cmake --build --preset mac -j "$jobs"
"$python" scripts/check_macho.py build/mac/bin/mlxtape

#!/bin/sh
# Brings the packages that building (and, with `lint` or `fuzz`, checking) needs, on Debian and Ubuntu.
#
#   scripts/setup.sh program  compiler, build tools, libraries: what the program and the library need
#   scripts/setup.sh          the same and what the tests need
#   scripts/setup.sh lint     the same and the LLVM tools of `make lint`
#   scripts/setup.sh arm      the same and the cross compiler and emulator of `make test-arm`
#   scripts/setup.sh mac      the build tools of `make mac-link`, which brings compiler and libraries itself
#   scripts/setup.sh fuzz     the same as the first and what `make fuzz` compiles with
#
# On macOS it names what to install with Homebrew, and installs nothing.
#
# Says nothing and takes no time when all is there. With MLXTAPE_NO_INSTALL=1 it installs nothing:
# it names what is missing, gives the line to type, and fails.
set -eu
cd "$(dirname "$0")/.."

# kind  package  how it is recognised: a program, or a header  what for
# nice: it goes without; brought where others are being installed.
needs() {
  cat <<'TABLE'
tool cmake              cmake                 configures the build (3.25 or newer)
tool ninja-build        ninja                 runs the build
TABLE
  if [ "${1:-}" = mac ]; then return; fi
  cat <<'TABLE'
tool g++                g++                   the compiler
lib  libhwy-dev         hwy/highway.h         SIMD instructions for the CPU kernels, headers only
lib  libpcre2-dev       pcre2.h               regular expressions of tokenizers
lib  libutf8proc-dev    utf8proc.h            Unicode: normal forms, case
lib  libcli11-dev       CLI/CLI.hpp           command line of the mlxtape program
TABLE
  if [ "${1:-}" = program ]; then return; fi
  cat <<'TABLE'
lib  nlohmann-json3-dev nlohmann/json.hpp     tests: a second reader of JSON
lib  libgtest-dev       gtest/gtest.h         tests
lib  libgmock-dev       gmock/gmock.h         tests: matchers
lib  librapidcheck-dev  rapidcheck.h          tests: random inputs with shrinking
nice mold               mold                  links the test programs quickly
TABLE
  if [ "${1:-}" = lint ]; then
    cat <<'TABLE'
llvm clang-format       clang-format          layout of the code
llvm clang-tidy         clang-tidy            bugs and names
llvm clang              clang++               second compiler
TABLE
  elif [ "${1:-}" = fuzz ]; then
    cat <<'TABLE'
llvm clang              clang++               compiler with libFuzzer
rt   libclang-rt        libclang_rt.fuzzer    libFuzzer and the sanitizers of Clang
TABLE
  fi
  if [ "${1:-}" = arm ]; then
    cat <<'TABLE'
tool g++-aarch64-linux-gnu aarch64-linux-gnu-g++ the compiler for 64-bit ARM
tool qemu-user          qemu-aarch64          runs programs for 64-bit ARM
TABLE
  fi
}

# The LLVM whose formatting counts (scripts/lint.sh says why).
llvm=19

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
has() { command -v "$1" >/dev/null 2>&1; }

has_header() {
  for root in /usr/include /usr/local/include /opt/homebrew/include; do
    [ -e "$root/$1" ] && return 0
  done
  return 1
}

has_llvm() {
  for version in '' -30 -29 -28 -27 -26 -25 -24 -23 -22 -21 -20 -18 -17 -16 -15 -14; do
    has "$1$version" && return 0
  done
  return 1
}

# A library of the Clang that is there, or will be.
clang_version() {
  compiler=$(scripts/llvm.sh clang++) || { echo "$llvm"; return; }
  "$compiler" -dumpversion | cut -d . -f 1
}
has_runtime() {
  compiler=$(scripts/llvm.sh clang++) || return 1
  [ -n "$(find "$("$compiler" -print-resource-dir)/lib" -name "$1*" 2>/dev/null)" ]
}

# ---- macOS: Command Line Tools have the compiler; the rest comes from Homebrew ----

if [ "$(uname -s)" = Darwin ]; then
  [ "${1:-}" != arm ] || fail "arm cross-builds are made on Debian; this machine runs those kernels itself"
  has c++ || fail "no C++ compiler: xcode-select --install"
  formulas=
  has cmake || formulas="$formulas cmake"
  has ninja || formulas="$formulas ninja"
  while read -r header formula; do
    case ${1:-}:$formula in program:nlohmann-json | program:googletest) continue ;; esac
    has_header "$header" || formulas="$formulas $formula"
  done <<'TABLE'
hwy/highway.h highway
pcre2.h pcre2
utf8proc.h utf8proc
CLI/CLI.hpp cli11
nlohmann/json.hpp nlohmann-json
gtest/gtest.h googletest
TABLE
  [ -z "$formulas" ] || fail "to install: brew install$formulas"
  # Homebrew has no formula of it. The program alone does not need it.
  [ "${1:-}" = program ] || has_header rapidcheck.h || say "the tests need rapidcheck: install it from https://github.com/emil-e/rapidcheck," \
    "or build without them: cmake --preset release -DMLXTAPE_BUILD_TESTS=OFF"
  exit 0
fi

missing=
extras=
reasons=
installed=
if has dpkg-query; then
  # shellcheck disable=SC2016,SC2046  # dpkg's own variables; one word per package is meant
  installed=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' \
    $(needs | awk '$1 == "lib" { print $2 }') 2>/dev/null | sed -n 's/ installed$//p' | tr '\n' ' ')
fi
while read -r kind package probe why; do
  case $kind in
    tool) has "$probe" && continue ;;
    nice)
      has "$probe" || extras="$extras $package"
      continue ;;
    lib)
      case " $installed " in *" $package "*) continue ;; esac
      has_header "$probe" && continue ;;
    llvm)
      has "$probe-$llvm" && continue
      # Another version will do only where this one cannot be had.
      if has apt-cache && [ -n "$(apt-cache search --names-only "^$package-$llvm\$" 2>/dev/null)" ]; then
        package=$package-$llvm
      elif has_llvm "$probe"; then
        continue
      fi ;;
    rt)
      has_runtime "$probe" && continue
      package=$package-$(clang_version)-dev ;;
  esac
  missing="$missing $package"
  reasons="$reasons  $package: $why
"
done <<TABLE
$(needs "$@")
TABLE

old_cmake() {
  version=$(cmake --version 2>/dev/null | sed -n '1s/[^0-9]*\([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
  [ -n "$version" ] || return 1
  # shellcheck disable=SC2086  # two words: major and minor
  set -- $version
  [ "$1" -lt 3 ] || { [ "$1" -eq 3 ] && [ "$2" -lt 25 ]; }
}
check_cmake() {
  old_cmake || return 0
  fail "$(cmake --version | head -n 1) is too old: 3.25 is needed (Debian 12, Ubuntu 24.04 or newer have it; elsewhere https://cmake.org/download)"
}

if [ -z "$missing" ]; then
  check_cmake
  exit 0
fi
missing=${missing# }

if ! has apt-get; then
  say "these are missing, named as in Debian:"
  printf '%s' "$reasons"
  fail "this system has no apt-get: install them with its own package manager, then call make again"
fi
if [ "${MLXTAPE_NO_INSTALL:-0}" != 0 ]; then
  say "missing:"
  printf '%s' "$reasons"
  fail "to install: apt-get install --no-install-recommends $missing"
fi

if [ "$(id -u)" -eq 0 ]; then
  root=
elif has sudo; then
  # Without a terminal sudo could only wait for a password that never comes.
  if [ -t 0 ]; then root=sudo; else root='sudo -n'; fi
else
  say "missing:"
  printf '%s' "$reasons"
  fail "neither root nor sudo here; as root: apt-get install --no-install-recommends $missing"
fi

say "installing with apt-get${root:+ (as root, through sudo)}:"
printf '%s' "$reasons"

apt() {
  # shellcheck disable=SC2086  # $root is no word or more
  $root env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 \
    -o Acquire::Retries=3 "$@" </dev/null
}
# One broken third-party source must not stop what the others can deliver.
apt update || say "apt-get update reported errors; trying with what is known"

if [ -n "${1:-}" ]; then
  chosen=
  for package in $missing; do
    case $package in
      clang | clang-*)
        base=${package%-"$llvm"}
        found=$(apt-cache search --names-only "^$base-[0-9]+\$" | awk '{ print $1 }' | sort -V)
        case " $(printf '%s' "$found" | tr '\n' ' ') " in
          *" $base-$llvm "*) package=$base-$llvm ;;
          *) package=$(printf '%s\n' "$found" | tail -n 1) ;;
        esac
        package=${package:-$base} ;;
      libclang-rt-*)  # of the Clang just chosen, if one was
        case $chosen in
          *" clang-"[0-9]*) package=libclang-rt-$(printf '%s' "$chosen" | sed 's/.* clang-\([0-9]*\).*/\1/')-dev ;;
        esac ;;
    esac
    chosen="$chosen $package"
  done
  missing=${chosen# }
fi

# shellcheck disable=SC2086  # one word per package
apt install -y --no-install-recommends $missing ||
  fail "apt-get could not install: $missing"
for package in $extras; do
  apt install -y --no-install-recommends "$package" || say "goes without $package"
done
check_cmake
say "done"

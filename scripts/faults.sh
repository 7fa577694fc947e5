#!/bin/bash
# Plants faults, one at a time, and expects the tests to fail: a test that passes whatever the kernel
# does is worth nothing.
#
#   scripts/faults.sh [op ...]           every file of tests/faults, or those named
#   scripts/faults.sh --check [op ...]   only whether each fault still finds its text
#   ONLY=text scripts/faults.sh ...      only the faults whose description holds the text
#
# tests/faults/<op>.faults runs that op's tests (op_tests), core.faults runs unit_tests, nn.faults those of the
# blocks, formats*.faults run formats_tests, models.faults model_tests, train.faults those of data and
# training, distil.faults those of evaluation, distillation and dynamic quantisation, tasks.faults those of the tasks,
# metal.faults metal_tests, metal_emulator.faults the checked ones of the emulator. So do faults in .metal files and in src/backends/metal, for the op's tests on the emulated device.
# In these files
#
#   file   src/ops/x/x.cpu.cpp     of the faults that follow
#   fault  what is wrong           one line
#   after  some text               optional, once in the file: look for `find` behind it
#   find   text                    once in the file; with `after`, the first one behind it
#   put    other text              in its place; may be empty
#
# `after` holds for one fault. Works on a copy of the tree, built at -O1 for the best SIMD target of
# this machine alone. Exit 1: a fault survived, does not compile or finds no text, or the tests fail
# without any.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
jobs=${JOBS:-2}  # files of faults worked on at once
limit=60  # seconds for the tests, or three times what they take without a fault; more counts as caught

fail() {
  printf 'faults: %s\n' "$*" >&2
  exit 1
}

check_only=0
if [ "${1:-}" = --check ]; then
  check_only=1
  shift
fi
names=("$@")
if [ $# = 0 ]; then
  for file in "$root"/tests/faults/*.faults; do names+=("$(basename "$file" .faults)"); done
fi

# ---- fault files ----

# The faults of a file, one per line, fields separated by the unit separator:
# file, description, after, find, put.
faults_of() {
  awk -v OFS='\037' -v only="${ONLY:-}" '
    function text() { sub(/^[a-z]+ */, ""); return $0 }
    /^#/ || /^$/ { next }
    $1 == "file" { file = text(); next }
    $1 == "fault" { what = text(); after = ""; find = ""; next }
    $1 == "after" { after = text(); next }
    $1 == "find" { find = text(); next }
    $1 == "put" { if (index(what, only)) print file, what, after, find, text(); next }
    { printf "%s:%d: must begin with file, fault, after, find or put\n", FILENAME, FNR >"/dev/stderr"; exit 1 }
  ' "$1"
}

# Writes the file with the fault to stdout; fails and says why when the text is not there once.
planted() { # file after find put
  perl -e '
    my ($file, $after, $find, $put) = @ARGV;
    open(my $in, "<", $file) or die "no such file\n";
    my $text = join("", <$in>);
    my $count = sub { my ($s, $n, $at) = ($_[0], 0, 0); while (($at = index($text, $s, $at)) >= 0) { $n++; $at++ } $n };
    length $find or die "nothing to find\n";
    my $from = 0;
    if (length $after) {
      my $n = $count->($after);
      $n == 1 or die "`after` must occur once, got $n times\n";
      $from = index($text, $after) + length $after;
    } else {
      my $n = $count->($find);
      $n == 1 or die "`find` must occur once, got $n times\n";
    }
    my $at = index($text, $find, $from);
    $at >= 0 or die "`find` does not occur behind `after`\n";
    $find ne $put or die "`put` must differ from `find`\n";
    substr($text, $at, length $find) = $put;
    print $text;
  ' "$@"
}

work=$(mktemp -d "${TMPDIR:-/tmp}/faults.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

stale=0
for name in "${names[@]}"; do
  [ -f "$root/tests/faults/$name.faults" ] || fail "no tests/faults/$name.faults"
  faults_of "$root/tests/faults/$name.faults" >"$work/$name.list"
  while IFS=$'\037' read -r file what after find put; do
    if ! planted "$root/$file" "$after" "$find" "$put" 2>"$work/why" >/dev/null; then
      printf '%-24s STALE     %s (%s: %s)\n' "$name" "$what" "$file" "$(cat "$work/why")"
      stale=$((stale + 1))
    fi
  done <"$work/$name.list"
done
if [ "$check_only" = 1 ]; then
  [ "$stale" = 0 ] || fail "$stale find no text"
  printf 'faults: %s find their text\n' "$(cat "$work"/*.list | wc -l)"
  exit 0
fi

# Several files: each in a copy of its own, as many at once as there are jobs.
if [ ${#names[@]} -gt 1 ]; then
  [ "$stale" = 0 ] || fail "$stale find no text"
  status=0
  printf '%s\n' "${names[@]}" | xargs -n 1 -P "$jobs" "$0" || status=1
  printf 'faults: %s after %d s\n' "$([ $status = 0 ] && echo 'all caught' || echo FAILED)" $SECONDS
  exit $status
fi

[ -s "$work/${names[0]}.list" ] || exit 0

# ---- the copy and its build ----

# The best target that this machine runs, as the static one: Highway then compiles no other.
target_flags() {
  local flags
  [ "$(uname -m)" = x86_64 ] && [ -r /proc/cpuinfo ] || return 0
  flags=" $(sed -n 's/^flags[^:]*: //p;/^flags/q' /proc/cpuinfo) "
  has() { local f; for f in "$@"; do [[ $flags == *" $f "* ]] || return 1; done; }
  has avx2 fma bmi1 bmi2 f16c abm aes pclmulqdq || return 0
  printf -- ' -mavx2 -mfma -mbmi -mbmi2 -mf16c -mlzcnt -maes -mpclmul'
  has avx512f avx512cd avx512bw avx512dq avx512vl || return 0
  printf -- ' -mavx512f -mavx512cd -mavx512bw -mavx512dq -mavx512vl'
}

copy=$work/tree
mkdir "$copy"
for entry in CMakeLists.txt bench cmake include src tests; do cp -R "$root/$entry" "$copy/$entry"; done
ops_list=$copy/src/ops/ops.list
if command -v ccache >/dev/null; then
  launcher=${CMAKE_CXX_COMPILER_LAUNCHER-ccache}
else
  launcher=
fi
export CCACHE_BASEDIR=$work CCACHE_NOHASHDIR=1  # the copy has another name every time
export RC_PARAMS=seed=1                          # the same random cases every time
ulimit -c 0

build() { # program
  nice cmake --build "$work/build" -j 2 --target "$1" >"$work/build.log" 2>&1
}
# Where timeout is no command of the system's: ended by SIGALRM, exit status 142.
within() { # seconds, command ...
  if command -v timeout >/dev/null; then timeout "$@"; else perl -e 'alarm shift; exec @ARGV or die' "$@"; fi
}
run_tests() { # program filter
  (
    within "$limit" nice "$work/build/bin/$1" --gtest_filter="$2" --gtest_fail_fast $flags
    exit $?  # else the shell would report a crash on its own stderr
  ) >"$work/test.log" 2>&1
}
# How the tests ended, by their exit status.
end_of() {
  local test how=
  test=$(sed -n 's/^\[  FAILED  \] \([^ ,]*\).*/\1/p' "$work/test.log" | head -n 1)
  if [ -z "$test" ]; then test=$(sed -n 's/^\[ RUN      \] //p' "$work/test.log" | tail -n 1); fi
  if [ "$1" = 124 ] || [ "$1" = 137 ] || [ "$1" = 142 ]; then
    how="the time limit in "
  elif ! grep -q ': Failure$' "$work/test.log"; then
    how="a crash in "
  fi
  printf 'by %s%s' "$how" "$test"
}

# An op and those whose public functions it calls.
with_callees() { # name
  local all=$1 more=$1
  while [ -n "$more" ]; do
    more=$(for op in $more; do
      sed -n 's|^#include "mlxtape/ops/\(.*\)\.h"|\1|p' "$copy/include/mlxtape/ops/$op.h" "$copy/src/ops/$op"/*
    done | sort -u | grep -vxF "$all" || true)
    all=$(printf '%s\n' $all $more | sort -u)
  done
  printf '%s\n' "$all"
}

# The tests of something named like_this are called LikeThis...
suites_of() { # name
  local suite
  suite=$(perl -pe 's/(^|_)([a-z0-9])/\U$2/g' <<<"$1")
  printf '%s\n' "$suite*:*/$suite*"
}

# Metal's kernels and what launches them have a program of their own.
is_of_metal() { # file
  [[ $1 != src/backends/metal/emulator/* ]] && [[ $1 == *.metal || $1 == *_metal-inl.h || $1 == src/backends/metal/* ]]
}
# "a*:*/a*" on the emulated device: "*/a*/metal".
on_metal() { # filter
  if [ "$1" = metal ]; then printf '*/metal:Metal*'; else printf '%s' "$1" | sed 's|[^:]*:\(\*/[^:]*\)|\1/metal|g'; fi
}

# Only the ops that the tests need are in the copy's list: a fault in a header then compiles few files.
prepare() { # name
  program=op_tests flags=--gtest_throw_on_failure  # stops at the first failure
  local ops=$1
  if [ "$1" = models ] || [ "$1" = train ] || [ "$1" = distil ] || [ "$1" = tasks ]; then
    program=model_tests flags= filter='*'
    if [ "$1" = distil ]; then filter='*Evaluate*:*Dwq*:*DynamicQuant*:*JobsParity*'; fi
    if [ "$1" = tasks ]; then filter='Tasks*:*/TaskModels*'; fi
    if [ "$1" = train ]; then filter='Permutations*:Batches*:PickSamples*:DataFiles*:Fit*:*/Fit*:*/StepGraphs*:*/Train*'; fi
    ops=$(grep -v '^#' "$ops_list")
  elif [ "$1" = core ] || [ "$1" = nn ] || [[ $1 == formats* ]]; then
    program=unit_tests flags=  # some of these tests expect failures
    filter='*'
    if [ "$1" = formats_text ]; then filter='ChatTemplate*:Regex*:Tokenizer*:StreamDecoder*'; fi
    if [ "$1" = formats_tokenizer ]; then filter='Tokenizer*:StreamDecoder*'; fi
    if [ "$1" = formats_gguf ]; then filter='Gguf*'; fi
    if [ "$1" = nn ]; then
      filter=$(for file in "$copy"/tests/nn/*_test.cpp; do suites_of "$(basename "$file" _test.cpp)"; done | paste -sd :)-*Wide*  # slow, and see no more
    fi
    ops=$(cat "$copy"/tests/{base,core,backends,support,tape,nn}/*.cpp "$copy"/bench/cases/*.cpp "$copy"/{src,include/mlxtape}/nn/* |
      sed -n 's|^#include "mlxtape/ops/\(.*\)\.h"|\1|p' | sort -u |
      while read -r op; do with_callees "$op"; done | sort -u)
    if [[ $1 == formats* ]]; then program=formats_tests ops=dropout; fi  # files know no op; the library must have one
  elif [ "$1" = metal ]; then
    program=metal_tests filter=metal ops=softmax
  elif [ "$1" = metal_emulator ]; then
    program=metal_emulator_tests_checked flags= filter='*' ops=dropout
  else
    filter=$(suites_of "$1")
    ops=$(with_callees "$1")
  fi
  local metal=OFF programs one
  programs=$(while IFS=$'\037' read -r file _; do
    if is_of_metal "$file"; then echo metal_tests; else echo $program; fi
  done <"$work/$1.list" | sort -u)
  if [ "$1" = metal_emulator ]; then metal=AUTO; fi
  if [[ $programs == *metal_tests* ]]; then  # whose tests of encoders use these two
    metal=AUTO
    ops=$(printf '%s\nsoftmax\nrms_norm\n' "$ops" | sort -u)
  fi
  printf '%s\n' "$ops" >"$ops_list"
  cmake -S "$copy" -B "$work/build" -G Ninja -DMLXTAPE_CUDA=OFF -DMLXTAPE_METAL=$metal -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" \
    -DCMAKE_BUILD_TYPE=Debug -DMLXTAPE_WERROR=OFF -DMLXTAPE_BUILD_EXAMPLES=OFF \
    -DCMAKE_CXX_FLAGS_DEBUG="-O1 -DHWY_COMPILE_ONLY_STATIC$(target_flags)" >"$work/build.log" 2>&1 ||
    { tail -n 40 "$work/build.log"; fail "does not configure"; }
  for one in $programs; do
    build $one || { tail -n 40 "$work/build.log"; fail "$1: does not build without a fault"; }
    local begun=$SECONDS these=$filter
    if [ $one = metal_tests ]; then these=$(on_metal "$filter"); fi
    limit=1800 run_tests $one "$these" || { tail -n 40 "$work/test.log"; fail "$1: tests fail without a fault"; }
    grep -q '^\[  PASSED  \] [1-9]' "$work/test.log" || fail "$1: no test matches $these"
    if [ $((3 * (SECONDS - begun))) -gt $limit ]; then limit=$((3 * (SECONDS - begun))); fi
  done
}

# ---- every fault ----

caught=0 survived=0 broken=0
for name in "${names[@]}"; do
  start=$SECONDS
  prepare "$name"
  printf '%-24s unfaulted: builds and passes (%d s)\n' "$name" $((SECONDS - start))
  while IFS=$'\037' read -r file what after find put <&3; do
    start=$SECONDS status=0 one=$program these=$filter
    if is_of_metal "$file"; then one=metal_tests these=$(on_metal "$filter"); fi
    cp "$copy/$file" "$work/saved"
    if ! planted "$work/saved" "$after" "$find" "$put" >"$copy/$file" 2>/dev/null; then
      result='STALE' place=$file
    elif ! build $one; then
      result='NO BUILD' place=$(grep -m 1 'error:' "$work/build.log" || echo "$file")
      broken=$((broken + 1))
    else
      run_tests $one "$these" || status=$?
      if [ $status = 0 ]; then
        result='SURVIVED' place=$file survived=$((survived + 1))
      else
        result='caught' place=$(end_of $status) caught=$((caught + 1))
      fi
    fi
    cp "$work/saved" "$copy/$file"
    printf '%-24s %-9s %s -- %s (%d s)\n' "$name" "$result" "$what" "$place" $((SECONDS - start))
  done 3<"$work/$name.list"
done
printf '%-24s %d caught, %d survived, %d stale, %d do not compile, in %d s\n' "${names[0]}" \
  $caught $survived $stale $broken $SECONDS
[ $((survived + stale + broken)) = 0 ]

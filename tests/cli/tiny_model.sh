# shellcheck shell=sh disable=SC2154  # program, here, folder
# What the tests of jobs share, behind expect.sh and in its folder: a tiny model, data for it, and runs that are stopped.

# A model whose vocabulary is the bytes below 64, quantised and not, and sums to learn: 12+3=15.
make_models
mkdir data
for part in train:48 valid:8 test:8; do
  awk -v n="${part#*:}" -v first="${#part}" 'BEGIN {
    for (i = 0; i < n; i++) {
      a = (7 * i + first) % 23; b = (11 * i) % 19
      printf "{\"prompt\": \"%d+%d=\", \"completion\": \"%d\"}\n", a, b, a + b
    }
  }' >"data/${part%:*}.jsonl"
done

# same_files <file> <file> <what they are of>
same_files() {
  cmp -s "$1" "$2" || complain "$3: $1 and $2 should be the same"
}

# one_line <text> <arguments...>: fails with this on one line, and nothing on stdout.
one_line() {
  text=$1
  shift
  said=$("$program" "$@" 2>&1 >"$folder/stdout")
  same "$(printf '%s\n' "$said" | wc -l)" 1 "lines of the error of $*"
  [ ! -s "$folder/stdout" ] || complain "$*: $(cat "$folder/stdout") on stdout"
  case $said in
    *"$text"*) ;;
    *) complain "$*: no '$text' in $said" ;;
  esac
}

# until_there <file>: waits for it, at most half a minute.
until_there() {
  tries=0
  while [ ! -e "$1" ] && [ $tries -lt 3000 ]; do
    sleep 0.01
    tries=$((tries + 1))
  done
}

# interrupted <file> <arguments...>: Ctrl-C once this file is there; its exit code is 130.
interrupted() {
  file=$1
  shift
  "$program" "$@" >"$folder/out" 2>"$folder/err" &
  job=$!
  until_there "$file"
  kill -INT $job
  wait $job
  same $? 130 "mlxtape $*, interrupted"
}

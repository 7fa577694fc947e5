# shellcheck shell=sh disable=SC2154  # program, here
# What the tests of the program share; they set program and here, and end with `exit $((failures > 0))`. $folder is theirs.
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
failures=0

# expect <exit code> <text in the output> <arguments...>
expect() {
  code=$1 text=$2
  shift 2
  output=$("$program" "$@" 2>&1)
  status=$?
  if [ "$status" -ne "$code" ]; then
    echo "mlxtape $*: exit $status, want $code: $output"
    failures=$((failures + 1))
  fi
  case $output in
    *"$text"*) ;;
    *)
      echo "mlxtape $*: no '$text' in: $output"
      failures=$((failures + 1))
      ;;
  esac
}

# complain <what is wrong>
complain() {
  echo "$*"
  failures=$((failures + 1))
}

# change <sed expression> <file>: in place, which each sed has another flag for
change() {
  sed "$1" "$2" >changed && cat changed >"$2" && rm changed
}

# same <text> <text> <what they are of>
same() {
  [ "$1" = "$2" ] || complain "$3: '$1' and '$2' should be the same"
}

# make_models: "quantised", a model whose vocabulary is the bytes below 64, and the same dequantised, "model".
make_models() {
  cp -r "$here/../parity/golden/qwen3_next_q4" quantised && chmod -R u+w quantised
  cp "$here/../../examples/bytes/tokenizer.json" quantised
  expect 0 "bits per weight" convert --model quantised --mlx-path model -d
}

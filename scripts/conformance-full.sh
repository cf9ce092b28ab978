#!/usr/bin/env bash
# Shows in full that the suite notices what is wrong: every mutant, the fault sweep and the race finder's mistakes, on the mock.
# Usage: scripts/conformance-full.sh [--write]
#
# Takes some minutes; CI runs a sample. --write puts the output into docs/conformance.md. Fails where one of the three does.
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-} in '' | --write) ;; *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2 ;; esac

target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --locked --release -p highwater-cli
program=$target/release/highwater
page=docs/conformance.md
begin='<!-- made by scripts/conformance-full.sh --write -->' end='<!-- end of what scripts/conformance-full.sh makes -->'

show() { # arguments
  local from=$SECONDS
  echo "\$ highwater conformance $*"
  env -u HIGHWATER_MOCK "$program" conformance "$@" 2>/dev/null
  echo "# $((SECONDS - from)) s"
}
outputs() {
  echo "On $(date -u +%F), $(nproc) cores, no GPU, $(rustc --version | cut -d' ' -f1-2):"
  echo
  echo '```console'
  show --saboteurs
  show --mutants
  show --fault-sweep
  show --races
  show --backend mock
  echo '```'
}
if [ "${1:-}" = --write ]; then
  made=$(outputs)
  written=$(mktemp)
  trap 'rm -f "$written"' EXIT
  {
    sed "\|^$begin\$|q" "$page"
    printf '\n%s\n\n' "$made"
    sed -n "\|^$end\$|,\$p" "$page"
  } >"$written"
  cp "$written" "$page"
else
  outputs
fi

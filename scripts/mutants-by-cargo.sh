#!/usr/bin/env bash
# Changes the code of a right backend with cargo-mutants, and lets the conformance suite look for each change.
# Usage: scripts/mutants-by-cargo.sh example|mock [--list | CARGO-MUTANTS-ARGUMENT...]
#
#   example  conformance/example-backend, as a plugin, by the program
#   mock     the files of the mock that execute work, by the suite's test with one device, with two and without abilities
#
# The arguments go to `cargo mutants`: `--shard 0/10` takes one of ten, `--re NAME` those of a function. Each mutant is built, and its
# suite runs for at most two minutes. Works in a copy of the tree. Prints the mutants that survive, and leaves the logs in
# target/mutants-by-cargo. All of them take hours, so this is run by hand. docs/conformance.md has the last results.
#
# Needs cargo-mutants: cargo install cargo-mutants --locked
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}
[ $# -ge 1 ] || usage
part=$1
shift
cargo mutants --version >/dev/null 2>&1 || { echo "cargo-mutants is missing: cargo install cargo-mutants --locked" >&2; exit 2; }

case $part in
  example)
    mutated=(--package highwater-example-backend)
    package=highwater-cli tests=(--test program the_backend_in_rust_conforms)
    ;;
  mock)
    mutated=(--package highwater-mock)
    for file in arena capture command device_memory engine event kernel mapped_memory product recording stream; do
      mutated+=(--file "backend-mock/src/$file.rs")
    done
    package=highwater-conformance tests=(--test suite mock::every_)
    ;;
  *) usage ;;
esac

if [ "${1:-}" = --list ]; then
  exec cargo mutants "${mutated[@]}" "$@"
fi
output=${CARGO_TARGET_DIR:-target}/mutants-by-cargo/$part
mkdir -p "$output"
# cargo-mutants would run the tests of the mutated package on the unchanged code, which has other tests.
cargo test --quiet --locked --package "$package" "${tests[@]}"
# The order round-robin gives each shard a part of every file. The code of a mutant may leave a variable without a use.
exec cargo mutants "${mutated[@]}" --baseline skip --sharding round-robin --cap-lints true --jobs 1 --timeout 120 \
  --build-timeout 900 --output "$output" "$@" --test-package "$package" -- "${tests[@]}"

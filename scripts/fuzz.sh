#!/usr/bin/env bash
# Searches inputs for which a promise of a parser does not hold. The parsers are those of tickets, batches, messages, lists, states of
# holders, and the steps of the ledger.
#
#     scripts/fuzz.sh [--keep] [RUNS [TARGET...]]
#
# RUNS inputs for each target, 1,000,000 by default. It starts from the inputs in fuzz/corpus and leaves them as they are; with --keep, it
# adds the inputs that reach further code, each as short as the search found it. An input that fails is written to fuzz/target/failed. Give
# it a name in fuzz/corpus, where `cargo test -p highwater-core fuzzing` calls the parser with it from then on.
#
# No nightly toolchain and no further program is needed: libFuzzer comes with the crate libfuzzer-sys, which needs a C++ compiler, and the
# flags below are those of `cargo fuzz` without the address sanitizer, which finds nothing in parsers without unsafe code.
set -euo pipefail
cd "$(dirname "$0")/../fuzz"

keep=false
if [[ ${1:-} == --keep ]]; then
    keep=true
    shift
fi
runs=${1:-1000000}
shift || true
targets=("$@")
if [[ ${#targets[@]} == 0 ]]; then
    for source in fuzz_targets/*.rs; do targets+=("$(basename "$source" .rs)"); done
fi

RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Ccodegen-units=1"
for flag in level=4 inline-8bit-counters pc-table trace-compares; do
    RUSTFLAGS+=" -Cllvm-args=-sanitizer-coverage-$flag"
done
export RUSTFLAGS
# With --target, the flags leave build scripts alone.
host=$(rustc -vV | sed -n 's/^host: //p')
cargo build --quiet --release --locked --target "$host" --target-dir target

for target in "${targets[@]}"; do
    program=target/$host/release/$target
    found=target/found/$target
    mkdir -p "$found" "target/failed/$target"
    case $target in
        ticket) longest=400 ;;
        batch) longest=1200 ;;
        ledger) longest=48 ;;
        *) longest=1400 ;;
    esac
    # The search writes to the first folder.
    if ! "$program" -runs="$runs" -max_len="$longest" -timeout=10 -print_final_stats=1 -artifact_prefix="target/failed/$target/" \
        "$found" "corpus/$target" >"target/$target.log" 2>&1; then
        tail -40 "target/$target.log"
        echo "$target: a promise does not hold for the input in fuzz/target/failed/$target" >&2
        exit 1
    fi
    coverage=$(grep -o 'cov: [0-9]*' "target/$target.log" | tail -1)
    executed=$(sed -n 's/^stat::number_of_executed_units: *//p' "target/$target.log")
    seconds=$(sed -n 's/^Done [0-9]* runs in \([0-9]*\) second.*/\1/p' "target/$target.log")
    echo "$target: $executed inputs in $seconds s, 0 failures, $coverage edges, $(find "corpus/$target" -type f | wc -l) inputs kept"
    if $keep; then
        "$program" -merge=1 -max_len="$longest" "corpus/$target" "$found" >>"target/$target.log" 2>&1
        echo "$target: now $(find "corpus/$target" -type f | wc -l) inputs are kept"
    fi
done

#!/usr/bin/env bash
# Runs the whole conformance suite on the plugins of the CUDA and the ROCm backend, over the simulated libraries. No arguments.
#
# Fails if a case fails, or if more are skipped than one device and the vendor's version explain.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }

target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --locked --release -p highwater-cli
cargo build --quiet --locked -p highwater-cuda-plugin -p highwater-rocm-plugin

conforms() { # vendor, most skipped
  local report
  report=$(scripts/simulated.sh "$1" "$target/release/highwater" conformance --json --allow-insecure-plugins \
    --plugin "$target/debug/libhighwater_$1.so") || { printf '%s\n' "$report"; return 1; }
  python3 -c '
import json, sys

vendor, most, report = sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)
passed, failed, skipped = (report[key] for key in ("passed", "failed", "skipped"))
print(f"{vendor}: {passed} cases passed, {failed} failed, {skipped} were skipped, of at most {most}")
sys.exit(failed != 0 or passed <= 200 or skipped > most)' "$1" "$2" <<<"$report"
}
conforms cuda 63
conforms rocm 134

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
  python3 - "$1" "$2" "$report" <<'END'
import json, sys

vendor, most, report = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
said = f"{vendor}: {report['passed']} cases passed, {report['failed']} failed, {report['skipped']} were skipped, and at most {most} may be"
print(said)
sys.exit(0 if report["failed"] == 0 and report["passed"] > 200 and report["skipped"] <= most else said)
END
}
conforms cuda 63
conforms rocm 134

#!/usr/bin/env bash
# Runs the whole conformance suite where `cargo test` runs parts of it: on the plugins of all backends, and over the simulated libraries
# of older CUDA and ROCm versions with two devices. No arguments.
#
# Fails if a case fails or is missing, or if more are skipped than the devices and the vendor's version explain.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }

# These variables describe devices and libraries to the program.
unset HIGHWATER_MOCK HIGHWATER_SIMULATED_CUDA HIGHWATER_SIMULATED_HIP CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES \
  CUBLAS_WORKSPACE_CONFIG ROCBLAS_TENSILE_LIBPATH VIRTUAL_ENV
target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --locked --release -p highwater-cli
cargo build --quiet --locked -p highwater-cuda-plugin -p highwater-rocm-plugin -p highwater-mock-plugin

conforms() { # most skipped, command
  local most=$1 report
  shift
  report=$("$@" --json) || { printf '%s\n' "$report"; return 1; }
  python3 -c '
import json, sys

command, most, report = sys.argv[1], int(sys.argv[2]), json.load(sys.stdin)
passed, failed, skipped, cases = (report[key] for key in ("passed", "failed", "skipped", "cases"))
print(f"{command}: {passed} cases passed, {failed} failed, {skipped} were skipped, of at most {most}")
sys.exit(failed != 0 or passed + skipped != cases or cases < 664 or skipped > most)' "$*" "$most" <<<"$report"
}
suite=("$target/release/highwater" conformance)
plugin() { # most skipped, backend, command before
  local most=$1 file=$target/debug/libhighwater_$2.so
  shift 2
  conforms "$most" "$@" "${suite[@]}" --allow-insecure-plugins --plugin "$file"
}
plugin 63 mock
plugin 63 cuda scripts/simulated.sh cuda
plugin 134 rocm scripts/simulated.sh rocm
export HIGHWATER_MOCK=devices=2
conforms 31 scripts/simulated.sh cuda:cuda-12 "${suite[@]}" --backend cuda
conforms 117 scripts/simulated.sh rocm6 "${suite[@]}" --backend rocm

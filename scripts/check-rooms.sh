#!/usr/bin/env bash
# Checks the walls of docs/ARCHITECTURE.md: core knows no vendor, no backend knows another, no unsafe outside the rooms
# that may have it, and a library user with one backend gets none of the program's dependencies.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "rooms: $1" >&2; exit 1; }
# The packages that a normal build of package $1 pulls in, by name; further arguments go to cargo.
dependencies() {
  local package=$1; shift
  cargo tree --locked --offline --quiet -p "$package" -e normal,build --prefix none --format '{p}' "$@" | cut -d' ' -f1 | sort -u
}
none_of() { # what, list, forbidden pattern
  if found=$(grep -E "^($3)\$" <<<"$2"); then fail "$1 depends on $(tr '\n' ' ' <<<"$found")"; fi
}

vendors='cudarc|hip-sys|cubecl-hip-sys|rocm-rs'
none_of core "$(dependencies highwater-core --all-features)" "$vendors|highwater|highwater-(cuda|rocm|mock|conformance)"
none_of backend-cuda "$(dependencies highwater-cuda)" 'highwater|highwater-(rocm|mock|conformance)'
none_of backend-rocm "$(dependencies highwater-rocm)" 'highwater|highwater-(cuda|mock|conformance)'
none_of backend-mock "$(dependencies highwater-mock)" "$vendors|highwater|highwater-(cuda|rocm|conformance)"
simulated="$vendors|highwater|highwater-(cuda|rocm|conformance)"
none_of backend-mock/simulated/engine "$(dependencies highwater-simulated-engine)" "$simulated"
none_of backend-mock/simulated/cuda "$(dependencies highwater-simulated-cuda)" "$simulated"
none_of conformance/example-backend "$(dependencies highwater-example-backend)" "$vendors|highwater|highwater-(cuda|rocm|mock|conformance)"
none_of conformance "$(dependencies highwater-conformance)" "$vendors|highwater|highwater-(cuda|rocm|mock)"

program='clap|clap_derive|indicatif|comfy-table|anyhow|safetensors|highwater-conformance|highwater-mock'
plugins='toml|toml_parser|toml_datetime|serde_spanned|winnow|serde_json'
none_of "a library user with the feature cuda" "$(dependencies highwater --no-default-features --features cuda)" \
  "$program|$plugins|highwater-rocm"
none_of "a library user with the feature plugins" "$(dependencies highwater --no-default-features --features plugins)" \
  "$program|highwater-(cuda|rocm)"

# Comments and strings may speak of it; code may not have it.
if grep -rnE '\bunsafe +(\{|fn|impl|extern|trait)' src examples --include='*.rs'; then fail "unsafe code in src/ or examples/"; fi
echo "rooms: ok"

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

ours=$(cargo metadata --no-deps --format-version 1 --locked --offline | grep -oE '"name":"highwater[a-z-]*"' | cut -d'"' -f4 | sort -u)
# Package, and the packages of this workspace that a normal build of it may pull in.
only() {
  local package=$1 allowed=" $1 highwater-hal ${*:2} " found
  found=$(dependencies "$package" --all-features | grep -Fx "$ours" || true)
  for other in $found; do
    case $allowed in *" $other "*) ;; *) fail "$package depends on $other" ;; esac
  done
}
only highwater-hal
only highwater-core
only highwater-driver
only highwater-plugin
only highwater-cuda highwater-driver
only highwater-rocm highwater-driver
only highwater-mock
only highwater-conformance
only highwater-example-backend highwater-plugin
for backend in cuda rocm; do only highwater-$backend-plugin highwater-$backend highwater-driver highwater-plugin; done
only highwater-mock-plugin highwater-mock highwater-plugin

vendors='cudarc|hip-sys|cubecl-hip-sys'
for package in hal core driver plugin mock conformance simulated-engine simulated-cuda; do
  none_of "$package" "$(dependencies "highwater-$package" --all-features)" "$vendors"
done
program='clap|clap_derive|indicatif|comfy-table|anyhow|safetensors|highwater-(conformance|mock|cli)'
plugins='toml|toml_parser|serde_json|highwater-plugin'
none_of "a library user with the feature cuda" "$(dependencies highwater --no-default-features --features cuda)" \
  "$program|$plugins|highwater-rocm"
none_of "a library user with the feature plugins" "$(dependencies highwater --no-default-features --features plugins)" \
  "$program|highwater-(cuda|rocm)"

# Comments and strings may speak of it; code may not have it.
if grep -rnE '\bunsafe +(\{|fn|impl|extern|trait)' src program/src examples --include='*.rs'; then fail "unsafe code in src/, program/ or examples/"; fi
echo "rooms: ok"

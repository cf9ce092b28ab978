#!/usr/bin/env bash
# Checks what no Cargo.toml can say: which packages each package may pull in through others, and that the front door, the
# program and the examples have no unsafe code.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "rooms: $1" >&2; exit 1; }
# Packages that matter here: ours, the vendors' bindings, and what only the program or the search for plugins needs.
watched='highwater|highwater-.*|cudarc|hip-sys|cubecl-hip-sys|clap|comfy-table|indicatif|anyhow|safetensors|serde_json|toml'

# Compares the watched packages in a normal build of package $1 with a list; further arguments go to cargo.
only() {
  local package=$1 allowed="$1|$2" found; shift 2
  found=$(cargo tree --locked --offline --quiet -p "$package" -e normal,build --prefix none --format '{p}' "$@" | cut -d' ' -f1 |
    sort -u | grep -Ex "$watched" | grep -Exv "$allowed" | tr '\n' ' ') || true
  [ -z "$found" ] || fail "$package ($*) depends on $found"
}
hal=highwater-hal cuda='highwater-(hal|driver|cuda)|cudarc' rocm='highwater-(hal|driver|rocm)'
only $hal '' --all-features
for package in core driver plugin mock conformance; do only highwater-$package "$hal" --all-features; done
only highwater-cudarc "$hal|highwater-core|cudarc" --all-features
only highwater-pytorch "$hal|highwater-core" --all-features
only highwater-cuda "$cuda"
only highwater-rocm "$rocm"
only highwater-cuda-plugin "$cuda|highwater-plugin"
only highwater-rocm-plugin "$rocm|highwater-plugin"
only highwater-mock-plugin "$hal|highwater-(mock|plugin)"
only highwater-example-backend "$hal|highwater-plugin"
only highwater-simulated-cuda "$hal|highwater-(mock|simulated-.*)"
only highwater "highwater-core|$cuda" --no-default-features --features cuda
only highwater "highwater-(core|plugin)|$hal|serde_json|toml" --no-default-features --features plugins

only highwater-c "highwater|highwater-(core|plugin|mock|rocm)|$cuda|serde_json|toml"

# Comments and strings may speak of it; code may not have it.
if grep -rnE '\bunsafe +(\{|fn|impl|extern|trait)' src program/src examples --include='*.rs'; then fail "unsafe code there"; fi
echo "rooms: ok"

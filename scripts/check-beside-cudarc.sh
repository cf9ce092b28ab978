#!/usr/bin/env bash
# Checks that a program can use Highwater's CUDA backend and `highwater-cudarc` beside cudarc with the features that candle asks
# for: all end up in one build of cudarc, whose features are then the union. Needs no CUDA. Usage: scripts/check-beside-cudarc.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/src"
cat >"$scratch/Cargo.toml" <<TOML
[package]
name = "beside-cudarc"
version = "0.0.0"
edition = "2024"

[dependencies]
highwater = { path = "$root", default-features = false, features = ["cuda"] }
highwater-cudarc = { path = "$root/interop/cudarc" }

[dependencies.cudarc]
version = "0.19"
default-features = false
features = ["std", "cublas", "cublaslt", "curand", "driver", "nvrtc", "f16", "cuda-version-from-build-system", "dynamic-linking"]

[workspace]
TOML
cat >"$scratch/src/main.rs" <<'RUST'
fn main() {
    // Both crates are used, so that both are checked.
    let _: fn(usize) -> Result<std::sync::Arc<cudarc::driver::CudaContext>, cudarc::driver::DriverError> =
        cudarc::driver::CudaContext::new;
    // The types of the joining crate are those of the same cudarc.
    let _join = |runtime: &highwater::Runtime, stream: &std::sync::Arc<cudarc::driver::CudaStream>| {
        <highwater::Stream as highwater_cudarc::StreamExt>::of(runtime, stream)
    };
    println!("{:?}", highwater::Stream::synchronize as fn(&highwater::Stream) -> highwater::Result<()>);
}
RUST
cp "$root/Cargo.lock" "$scratch/"
CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$root/target}/beside-cudarc" cargo check --quiet --manifest-path "$scratch/Cargo.toml"
echo "beside cudarc: ok"

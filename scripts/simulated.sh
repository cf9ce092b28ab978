#!/usr/bin/env bash
# Runs a command over simulated vendor libraries. Usage: scripts/simulated.sh cuda[:VARIANT] COMMAND [ARGUMENT...]
#
# Builds the look-alikes of NVIDIA's libraries (backend-mock/simulated), lays them out under the vendor's names in a folder
# of their own, and runs COMMAND with that folder first on the loader's path. Standard output and the exit status are those
# of COMMAND. HIGHWATER_MOCK says what the devices are like, HIGHWATER_SIMULATED_CUDA how the driver differs.
#
# VARIANT is one way in which an installation can be broken, or can be another:
#
#   no-symbol     the driver lacks cuStreamWaitEvent
#   two-symbols   the driver has cuInit and cuDriverGetVersion and nothing else
#   junk          the driver is a file that is no library
#   old-driver    the driver says that it is of CUDA 11.8
#   no-device     the driver finds no device (100)
#   stub          the driver is the one of a toolkit, to be linked to (34)
#   unknown-code  the first cuDevicePrimaryCtxRetain answers 921, a code that no header knows
#   no-cublas     there is a driver, and no cuBLAS or cuBLASLt
#   wrong-major   cuBLAS and cuBLASLt are there as version 11 only
#   cuda-12       not broken: a driver of CUDA 12.8, with cuBLAS and cuBLASLt 12
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}
[ $# -ge 2 ] || usage
vendor=${1%%:*} variant=
case $1 in *:*) variant=${1#*:} ;; esac
shift
settings=
case $vendor in cuda) ;; *) usage ;; esac
case $variant in
  '' | no-symbol | two-symbols | junk | no-cublas | wrong-major) ;;
  old-driver) settings=driver-version=11080 ;;
  no-device) settings=devices=none ;;
  stub) settings=library=stub ;;
  unknown-code) settings=unknown-code=cuDevicePrimaryCtxRetain ;;
  cuda-12)
    settings=driver-version=12080
    export HIGHWATER_SIMULATED_CUBLAS_VERSION=${HIGHWATER_SIMULATED_CUBLAS_VERSION:-120804}
    ;;
  *) usage ;;
esac

root=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
# In the root, so that its toolchain and configuration count. A relative target folder counts from where the caller is.
case $target in /*) ;; *) target=$PWD/$target ;; esac
(cd "$root" && CARGO_TARGET_DIR=$target cargo build --quiet --locked --profile simulated \
  -p highwater-simulated-cuda -p highwater-simulated-cublas -p highwater-simulated-cublaslt >&2)
built=$target/simulated

# Outside of cargo's own library folders, which it puts on the path of what it runs.
folder=$target/simulated/vendor/$vendor${variant:+-$variant}
mkdir -p "$folder"
# Each file is replaced at once by a whole one, so others may lay out and load the same meanwhile.
scratch=$(mktemp -d "$target/simulated/vendor/.lay-out.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
put() { # name; the bytes come from standard input
  cat >"$scratch/$1"
  cmp -s "$scratch/$1" "$folder/$1" || mv -f "$scratch/$1" "$folder/$1"
}
# Renames symbols in a library without moving anything: the new names are as long as the old ones.
rename() { LC_ALL=C sed -z "$@"; }

case $variant in
  no-symbol) rename 's/^cuStreamWaitEvent$/no_treamWaitEvent/' <"$built/libhwsim_cuda.so" ;;
  two-symbols) rename -E '/^(cuInit|cuDriverGetVersion)$/!s/^cu([A-Z][A-Za-z0-9_]*)$/no\1/' <"$built/libhwsim_cuda.so" ;;
  junk) echo "no library" ;;
  *) cat "$built/libhwsim_cuda.so" ;;
esac | put libcuda.so.1
case $variant in
  no-cublas) ;;
  wrong-major | cuda-12)
    case $variant in cuda-12) major=12 ;; *) major=11 ;; esac
    rename "s/^libcublas\.so\.13\$/libcublas.so.$major/" <"$built/libhwsim_cublas.so" | put "libcublas.so.$major"
    rename "s/^libcublasLt\.so\.13\$/libcublasLt.so.$major/" <"$built/libhwsim_cublaslt.so" | put "libcublasLt.so.$major"
    ;;
  *)
    put libcublas.so.13 <"$built/libhwsim_cublas.so"
    put libcublasLt.so.13 <"$built/libhwsim_cublaslt.so"
    ;;
esac
rm -rf "$scratch"
trap - EXIT

[ -z "$settings" ] || export HIGHWATER_SIMULATED_CUDA="${HIGHWATER_SIMULATED_CUDA:+$HIGHWATER_SIMULATED_CUDA,}$settings"
export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$@"

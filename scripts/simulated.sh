#!/usr/bin/env bash
# Runs a command over simulated vendor libraries. Usage: scripts/simulated.sh VENDOR[:VARIANT] COMMAND [ARGUMENT...]
#
# VENDOR is cuda, rocm or rocm6. Builds the simulated libraries of that vendor (`simulated/`), lays them out under the
# vendor's names in a folder of their own, and runs COMMAND with that folder first on the loader's path. Standard output and
# the exit status are those of COMMAND. HIGHWATER_MOCK sets the properties of the devices. HIGHWATER_SIMULATED_CUDA and
# HIGHWATER_SIMULATED_HIP set those of the driver.
#
#   cuda    a driver of CUDA 13.0, with cuBLAS and cuBLASLt 13
#   rocm    HIP 7.2, with hipBLAS 3 and hipBLASLt 1
#   rocm6   HIP 6.4, with hipBLAS 2 and hipBLASLt 0
#
# VARIANT is one defect or another version of an installation. For each vendor:
#
#   no-symbol     the driver lacks cuStreamWaitEvent or hipStreamWaitEvent
#   two-symbols   the driver has two functions only: the one that starts it and the one that returns its version
#   junk          the driver's file is not a library
#   no-device     the driver reports no device (100)
#   unknown-code  the first cuDevicePrimaryCtxRetain or hipStreamCreateWithPriority returns 921, a code of no header
#
# For cuda:
#
#   old-driver    the driver reports CUDA 11.8
#   stub          the driver is a toolkit's stub for linking (34)
#   no-cublas     cuBLAS and cuBLASLt are missing
#   wrong-major   cuBLAS and cuBLASLt are of version 11
#   cuda-12       no defect: a driver of CUDA 12.8, with cuBLAS and cuBLASLt 12
#
# For rocm and rocm6:
#
#   no-hipblas    hipBLAS is missing
#   wrong-major   hipBLAS is of the other HIP's version: 2 for rocm, 3 for rocm6
#   hip-5         HIP is of version 5, and hipBLAS is missing
#   no-hipblaslt  hipBLASLt is missing
#   old-lt        hipBLASLt lacks hipblasLtMatmulAlgoGetHeuristic
#   empty-lt      hipBLASLt finds no algorithm for any product
#   no-kernels    rocBLAS has no kernels for the devices: the first product ends the process. hipBLASLt is missing
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
case $vendor:$variant in
  cuda: | rocm: | rocm6:) ;;
  cuda:no-symbol | rocm:no-symbol | rocm6:no-symbol) ;;
  cuda:two-symbols | rocm:two-symbols | rocm6:two-symbols) ;;
  cuda:junk | rocm:junk | rocm6:junk) ;;
  cuda:no-device | rocm:no-device | rocm6:no-device) settings=devices=none ;;
  cuda:unknown-code) settings=unknown-code=cuDevicePrimaryCtxRetain ;;
  cuda:no-cublas | cuda:wrong-major) ;;
  cuda:old-driver) settings=driver-version=11080 ;;
  cuda:stub) settings=library=stub ;;
  cuda:cuda-12)
    settings=driver-version=12080
    export HIGHWATER_SIMULATED_CUBLAS_VERSION=${HIGHWATER_SIMULATED_CUBLAS_VERSION:-120804}
    ;;
  rocm:unknown-code | rocm6:unknown-code) settings=unknown-code=hipStreamCreateWithPriority ;;
  rocm:no-hipblas | rocm6:no-hipblas) ;;
  rocm:no-hipblaslt | rocm6:no-hipblaslt | rocm:old-lt | rocm6:old-lt) ;;
  rocm:empty-lt | rocm6:empty-lt) export HIGHWATER_SIMULATED_HIPBLASLT_EMPTY=1 ;;
  rocm:wrong-major) settings=hipblas=2 ;;
  rocm6:wrong-major) settings=hipblas=3 ;;
  rocm:hip-5 | rocm6:hip-5) ;;
  rocm:no-kernels | rocm6:no-kernels) settings=kernels=none ;;
  *) usage ;;
esac
# The versions of HIP, hipBLAS and hipBLASLt that the files are named for.
hip=7 hipblas=3 hipblaslt=1 version=7.2
case $vendor in rocm6) hip=6 hipblas=2 hipblaslt=0 version=6.4 ;; esac
case $vendor:$variant in
  *:hip-5) hip=5 version=5.7 ;;
  rocm:wrong-major) hipblas=2 ;;
  rocm6:wrong-major) hipblas=3 ;;
esac
case $vendor in rocm*) settings=version=$version${settings:+,$settings} ;; esac

root=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
# Cargo runs in the root, for its toolchain and configuration. A relative target folder is relative to the caller's folder.
case $target in /*) ;; *) target=$PWD/$target ;; esac
case $vendor in
  cuda) packages=(cuda cublas cublaslt) ;;
  *) packages=(hip hipblas hipblaslt) ;;
esac
built=$target/simulated
# Tests run this script hundreds of times, and cargo takes most of its time. They set HIGHWATER_SIMULATED_BUILT once it has built.
if [ -n "${HIGHWATER_SIMULATED_BUILT:-}" ]; then
  unset HIGHWATER_SIMULATED_BUILT
elif command -v cargo >/dev/null; then
  [ -f "$built/libhwsim_${packages[0]}.so" ] || echo "simulated.sh: building the simulated libraries, once" >&2
  (cd "$root" && CARGO_TARGET_DIR=$target cargo build --quiet --locked --profile simulated \
    "${packages[@]/#/--package=highwater-simulated-}" >&2)
else
  # The tests were copied to this machine, with the libraries.
  for package in "${packages[@]}"; do
    [ -f "$built/libhwsim_$package.so" ] || {
      echo "simulated.sh: there is no cargo to build $built/libhwsim_$package.so: install Rust, or copy the file there" >&2
      exit 2
    }
  done
fi

# Outside of cargo's library folders, which cargo puts on the loader's path of the programs that it runs.
folder=$target/simulated/vendor/$vendor${variant:+-$variant}
[ -d "$folder" ] || rm -f "$folder.made-of"
mkdir -p "$folder"
# The sources of the folder, by inode, time and size. A test program runs this script hundreds of times, and renaming symbols
# takes most of a second.
libraries=("${packages[@]/#/$built/libhwsim_}")
made_of=$(stat -c '%i %y %s' "${BASH_SOURCE[0]}" "${libraries[@]/%/.so}")
# Each file is replaced atomically, so other processes may lay out and load the same folder meanwhile.
scratch=$(mktemp -d "$target/simulated/vendor/.lay-out.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
put() { # name; the bytes come from standard input
  cat >"$scratch/$1"
  cmp -s "$scratch/$1" "$folder/$1" || mv -f "$scratch/$1" "$folder/$1"
}
# The name that programs link by. Some programs look for it first, and must not find a real library by it.
link() { # target, name
  ln -sfn "$1" "$folder/$2"
}
# Renames symbols in a library. The new names are as long as the old ones, so that nothing moves.
rename() { LC_ALL=C sed -z "$@"; }

lay_out_cuda() {
  case $variant in
    no-symbol) rename 's/^cuStreamWaitEvent$/no_treamWaitEvent/' <"$built/libhwsim_cuda.so" ;;
    two-symbols) rename -E '/^(cuInit|cuDriverGetVersion)$/!s/^cu([A-Z][A-Za-z0-9_]*)$/no\1/' <"$built/libhwsim_cuda.so" ;;
    junk) echo "no library" ;;
    *) cat "$built/libhwsim_cuda.so" ;;
  esac | put libcuda.so.1
  link libcuda.so.1 libcuda.so
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
      link libcublas.so.13 libcublas.so
      link libcublasLt.so.13 libcublasLt.so
      ;;
  esac
}

lay_out_rocm() {
  # The symbols that a version lacks.
  local absent lacking=(-e "s/^libamdhip64\.so\.7\$/libamdhip64.so.$hip/")
  case $hip in
    7) ;;
    *) lacking+=(-e 's/^hip(StreamGetId|GetDriverEntryPoint)$/no_\1/') ;;
  esac
  case $hip in
    5) lacking+=(-e 's/^hip(GetDevicePropertiesR0[06]00|GetProcAddress|EventRecordWithFlags)$/no_\1/') ;;
  esac
  case $variant in
    no-symbol) lacking+=(-e 's/^hipStreamWaitEvent$/no_StreamWaitEvent/') ;;
    two-symbols) lacking+=(-e '/^(hipInit|hipRuntimeGetVersion)$/!s/^hip([A-Z][A-Za-z0-9_]*)$/no_\1/') ;;
  esac
  case $variant in
    junk) echo "no library" ;;
    *) rename -E "${lacking[@]}" <"$built/libhwsim_hip.so" ;;
  esac | put "libamdhip64.so.$hip"
  case $variant in no-hipblas | hip-5) return ;; esac
  case $hipblas in
    3) absent='s/^hipblas(Gemm[A-Za-z]*Ex_v2(_64)?)$/no_blas\1/' ;;
    *) absent='s/^hipblasSetWorkspace$/no_blasSetWorkspace/' ;;
  esac
  rename -E -e "s/^libhipblas\.so\.3\$/libhipblas.so.$hipblas/" -e "$absent" <"$built/libhwsim_hipblas.so" |
    put "libhipblas.so.$hipblas"
  case $variant in
    no-hipblaslt | no-kernels) ;;
    *)
      case $variant in old-lt) absent='s/^hipblasLtMatmulAlgoGetHeuristic$/no_blasLtMatmulAlgoGetHeuristic/' ;; *) absent= ;; esac
      rename -E -e "s/^libhipblaslt\.so\.1\$/libhipblaslt.so.$hipblaslt/" -e "$absent" <"$built/libhwsim_hipblaslt.so" |
        put "libhipblaslt.so.$hipblaslt"
      ;;
  esac
  # rocBLAS finds the devices that it has kernels for by these files.
  mkdir -p "$folder/rocblas/library"
  case $variant in
    no-kernels) ;;
    *) : >"$folder/rocblas/library/TensileLibrary_lazy_gfx942.dat" ;;
  esac
}

if [ "$(cat "$folder.made-of" 2>/dev/null)" != "$made_of" ]; then
  case $vendor in
    cuda) lay_out_cuda ;;
    *) lay_out_rocm ;;
  esac
  # Written last, so that it marks a complete folder.
  echo "$made_of" >"$scratch/made-of"
  mv -f "$scratch/made-of" "$folder.made-of"
fi
rm -rf "$scratch"
trap - EXIT

case $vendor in
  cuda)
    [ -z "$settings" ] || export HIGHWATER_SIMULATED_CUDA="${HIGHWATER_SIMULATED_CUDA:+$HIGHWATER_SIMULATED_CUDA,}$settings"
    ;;
  *) export HIGHWATER_SIMULATED_HIP="$settings${HIGHWATER_SIMULATED_HIP:+,$HIGHWATER_SIMULATED_HIP}" ;;
esac
export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$@"

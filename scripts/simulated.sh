#!/usr/bin/env bash
# Runs a command over simulated vendor libraries. Usage: scripts/simulated.sh VENDOR[:VARIANT] COMMAND [ARGUMENT...]
#
# VENDOR is cuda, rocm or rocm6. Builds the look-alikes of its libraries (`simulated/`), lays them out under the
# vendor's names in a folder of their own, and runs COMMAND with that folder first on the loader's path. Standard output and
# the exit status are those of COMMAND. HIGHWATER_MOCK says what the devices are like, HIGHWATER_SIMULATED_CUDA or
# HIGHWATER_SIMULATED_HIP how the driver differs.
#
#   cuda    a driver of CUDA 13.0, with cuBLAS and cuBLASLt 13
#   rocm    HIP 7.2, with hipBLAS 3
#   rocm6   HIP 6.4, with hipBLAS 2
#
# VARIANT is one way in which an installation can be broken, or can be another. For each vendor:
#
#   no-symbol     the driver lacks cuStreamWaitEvent or hipStreamWaitEvent
#   two-symbols   the driver has two functions, the one that starts it and the one for its version
#   junk          the driver is a file that is no library
#   no-device     the driver finds no device (100)
#   unknown-code  the first cuDevicePrimaryCtxRetain or hipStreamCreateWithPriority answers 921, a code that no header knows
#
# For cuda:
#
#   old-driver    the driver says that it is of CUDA 11.8
#   stub          the driver is the one of a toolkit, to be linked to (34)
#   no-cublas     there is a driver, and no cuBLAS or cuBLASLt
#   wrong-major   cuBLAS and cuBLASLt are there as version 11 only
#   cuda-12       not broken: a driver of CUDA 12.8, with cuBLAS and cuBLASLt 12
#
# For rocm and rocm6:
#
#   no-hipblas    there is HIP, and no hipBLAS
#   wrong-major   hipBLAS is there as the version of the other HIP only: 2 for rocm, 3 for rocm6
#   hip-5         HIP is there as version 5 only, and no hipBLAS
#   no-kernels    rocBLAS has no kernels for the devices, so that the first product ends the process
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
  rocm:wrong-major) settings=hipblas=2 ;;
  rocm6:wrong-major) settings=hipblas=3 ;;
  rocm:hip-5 | rocm6:hip-5) ;;
  rocm:no-kernels | rocm6:no-kernels) settings=kernels=none ;;
  *) usage ;;
esac
# The versions of HIP and hipBLAS that the files are named for.
hip=7 hipblas=3 version=7.2
case $vendor in rocm6) hip=6 hipblas=2 version=6.4 ;; esac
case $vendor:$variant in
  *:hip-5) hip=5 version=5.7 ;;
  rocm:wrong-major) hipblas=2 ;;
  rocm6:wrong-major) hipblas=3 ;;
esac
case $vendor in rocm*) settings=version=$version${settings:+,$settings} ;; esac

root=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
# In the root, so that its toolchain and configuration count. A relative target folder counts from where the caller is.
case $target in /*) ;; *) target=$PWD/$target ;; esac
case $vendor in
  cuda) packages=(cuda cublas cublaslt) ;;
  *) packages=(hip hipblas) ;;
esac
built=$target/simulated
if command -v cargo >/dev/null; then
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

# Outside of cargo's own library folders, which it puts on the path of what it runs.
folder=$target/simulated/vendor/$vendor${variant:+-$variant}
[ -d "$folder" ] || rm -f "$folder.made-of"
mkdir -p "$folder"
# The source files of the folder, by path, time and size. A test file runs this script hundreds of times, and renaming
# symbols takes most of a second.
libraries=("${packages[@]/#/$built/libhwsim_}")
made_of=$(stat -c '%i %y %s' "${BASH_SOURCE[0]}" "${libraries[@]/%/.so}")
# Each file is replaced at once by a whole one, so others may lay out and load the same meanwhile.
scratch=$(mktemp -d "$target/simulated/vendor/.lay-out.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
put() { # name; the bytes come from standard input
  cat >"$scratch/$1"
  cmp -s "$scratch/$1" "$folder/$1" || mv -f "$scratch/$1" "$folder/$1"
}
# The name that programs link by, which some look for first: a real library of that name must not come before these.
link() { # target, name
  ln -sfn "$1" "$folder/$2"
}
# Renames symbols in a library without moving anything: the new names are as long as the old ones.
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
  # What a version lacks.
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
  # By these files rocBLAS tells which devices it has kernels for.
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

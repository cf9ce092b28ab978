#!/usr/bin/env bash
# Compiles the memory resource of RMM (examples/rmm) and the memory provider of UMF (examples/umf) against the libraries' own headers.
# Runs their programs on the mock. Takes no arguments.
#
# Fetches 15 MB of wheels from PyPI, by version and hash. They stay in target/allocators. Needs Python with `venv`, a C++20 compiler and
# pkg-config. The wheels are for x86-64.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(uname -m)" = x86_64 ] || { echo "allocators: left out, because the wheels are for x86-64"; exit 0; }

work=$(realpath -m "${CARGO_TARGET_DIR:-target}")/allocators
mkdir -p "$work"
fetch() { # file of requirements, folder
  cmp -s "$1" "$work/$2.fetched" && return
  rm -rf "${work:?}/$2" "$work/wheels"
  [ -x "$work/python/bin/pip" ] || python3 -m venv "$work/python"
  "$work/python/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes -r "$1" -d "$work/wheels"
  for wheel in "$work"/wheels/*.whl; do
    python3 -m zipfile -e "$wheel" "$work/$2"
  done
  rm -rf "$work/wheels"
  cp "$1" "$work/$2.fetched"
}
fetch examples/allocators.txt new
fetch examples/allocators-26.4.txt old

prefix=$work/c
scripts/install-c.sh "$prefix"
export HIGHWATER_BACKEND=mock
read -ra highwater < <(PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config --cflags --libs highwater)
highwater+=("-Wl,-rpath,$prefix/lib")
warnings=(-g -O1 -pthread -Wall -Wextra -Wpedantic -Werror)
# Links with libraries in a folder of a wheel.
of() { # folder, library
  printf '%s\n' "-L$1" "-l:$2" "-Wl,-rpath,$1" "-Wl,-rpath-link,$1"
}

umf=$(echo "$work"/new/umf-*.data/data) hwloc=$(echo "$work"/new/tcmlib-*.data/data/lib)
mapfile -t libraries < <(of "$umf/lib" libumf.so.1 && of "$hwloc" libhwloc.so.15)
# The program loads libhwloc itself, because libumf.so does not say where it is.
"${CC:-cc}" -std=c11 "${warnings[@]}" -isystem "$umf/include" -o "$work/umf-check" examples/umf/check.c examples/umf/highwater_provider.c \
  "${highwater[@]}" -Wl,--no-as-needed "${libraries[@]}"
"$work/umf-check"

cuda=$work/new/nvidia/cu13 logger=$work/new/rapids_logger
for version in new old; do
  rmm=$work/$version/librmm
  mapfile -t libraries < <(of "$rmm/lib64" librmm.so && of "$logger/lib64" librapids_logger.so && of "$cuda/lib" libcudart.so.13)
  # The C examples set some fields of a struct; RMM deprecates its own classes in its headers.
  "${CXX:-c++}" -std=c++20 "${warnings[@]}" -Wno-missing-field-initializers -Wno-deprecated-declarations \
    -isystem "$rmm/include" -isystem "$rmm/include/rapids" -isystem "$logger/include" -isystem "$cuda/include" \
    -o "$work/rmm-check-$version" examples/rmm/check.cpp "${highwater[@]}" -Wl,--no-as-needed "${libraries[@]}"
  "$work/rmm-check-$version"
done

#!/usr/bin/env bash
# Builds the C library and installs it with its header and its pkg-config file: `install-c.sh PREFIX [--release]`.
#
# `cargo cinstall -p highwater-c` of cargo-c does the same: scripts/check-cargo-c.sh compares the two. This script needs cargo alone.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
usage() { sed -n '2s/^# //p' "$0"; }
case ${1:-} in
  -h | --help) usage; exit 0 ;;
  '' | -*) usage >&2; exit 2 ;;
esac
profile=debug options=()
case $#,${2:-} in
  1,) ;;
  2,--release) profile=release options=(--release) ;;
  *) usage >&2; exit 2 ;;
esac
mkdir -p -- "$1"
prefix=$(cd -- "$1" && pwd)

cargo build --quiet --locked --manifest-path "$root/Cargo.toml" -p highwater-c "${options[@]}"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/Cargo.toml" | head -n 1)
# The words of the pkg-config file are those that cargo-c takes.
of_cargo_c() { sed -n "/^\[package.metadata.capi.pkg_config\]/,/^\[/s/^$1 = \"\(.*\)\"/\1/p" "$root/c-api/Cargo.toml"; }
target=$(cargo metadata --manifest-path "$root/Cargo.toml" --no-deps --offline --locked --format-version 1 |
  sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
mkdir -p "$prefix/lib/pkgconfig" "$prefix/include/highwater"

# Renamed into place, so that a program which runs keeps its library.
put() { # file, place
  cp "$1" "$2.new.$$"
  mv -f "$2.new.$$" "$2"
}
put "$target/$profile/libhighwater.so" "$prefix/lib/libhighwater.so.$version"
put "$target/$profile/libhighwater.a" "$prefix/lib/libhighwater.a"
put "$root/c-api/include/highwater/highwater.h" "$prefix/include/highwater/highwater.h"
# Before 1.0, a minor version may break the ABI.
ln -sfn "libhighwater.so.$version" "$prefix/lib/libhighwater.so.${version%.*}"
ln -sfn "libhighwater.so.$version" "$prefix/lib/libhighwater.so"
cat >"$prefix/lib/pkgconfig/highwater.pc" <<PC
prefix=$prefix
libdir=\${prefix}/lib
includedir=\${prefix}/include

Name: $(of_cargo_c name)
Description: $(of_cargo_c description)
Version: $version
Libs: -L\${libdir} -lhighwater
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl -lc
Cflags: -I\${includedir}
PC
# The line that makes pkg-config find it.
echo "export PKG_CONFIG_PATH=\"$prefix/lib/pkgconfig:\$PKG_CONFIG_PATH\""

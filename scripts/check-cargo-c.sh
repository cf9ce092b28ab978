#!/usr/bin/env bash
# Checks that `cargo cinstall` of cargo-c and scripts/install-c.sh install the same C library. Builds the examples by pkg-config against
# the library of cargo-c, shared and static, and runs them on the mock. Takes no arguments.
#
# Needs cargo-c (`cargo install --locked cargo-c@0.10.24`), pkg-config and make. CI does not run it, because the installation of cargo-c
# takes several minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "cargo-c: $1" >&2; exit 1; }
cargo cinstall --version >/dev/null 2>&1 || fail "it is not installed: cargo install --locked cargo-c@0.10.24"
target=$(realpath -m "${CARGO_TARGET_DIR:-target}")
work=$target/cargo-c
rm -rf "$work"
mkdir -p "$work"
trap 'rm -rf "$work"' EXIT
export HIGHWATER_BACKEND=mock

cargo cinstall --locked --debug -p highwater-c --target-dir "$work/build" --prefix="$work/theirs" --libdir=lib 2>"$work/log" ||
  { cat "$work/log" >&2; fail 'cargo cinstall failed'; }
scripts/install-c.sh "$work/ours"

# Names, links, the header, the soname and the fields of the pkg-config file.
tree() { (cd "$1" && find . -type f -printf '%p\n' -o -type l -printf '%p -> %l\n' | sort); }
diff <(tree "$work/theirs") <(tree "$work/ours") || fail 'the files differ'
cmp "$work/theirs/include/highwater/highwater.h" "$work/ours/include/highwater/highwater.h" || fail 'the headers differ'
soname() { readelf -d "$1/lib/libhighwater.so" | sed -n 's/.*(SONAME).*\[\(.*\)\]/\1/p'; }
[ "$(soname "$work/theirs")" = "$(soname "$work/ours")" ] || fail 'the sonames differ'
# As pkg-config reads it, each word once.
fields() {
  for question in --modversion --cflags --libs '--static --libs'; do
    # shellcheck disable=SC2086
    PKG_CONFIG_PATH=$1/lib/pkgconfig pkg-config $question highwater | tr ' ' '\n' | sed "s|$1|PREFIX|" | sort -u | xargs
  done
  grep '^\(Name\|Description\):' "$1/lib/pkgconfig/highwater.pc"
}
diff <(fields "$work/theirs") <(fields "$work/ours") || fail 'the pkg-config files differ'

make -s -C examples/c check PREFIX="$work/theirs" BUILD="$work/shared"
ldd "$work/shared/gemm" | grep -q "$work/theirs/lib/$(soname "$work/theirs")" || fail 'the example does not use the shared library'

static=$(PKG_CONFIG_PATH=$work/theirs/lib/pkgconfig pkg-config --static --cflags --libs highwater)
# shellcheck disable=SC2086
${CC:-cc} -std=c11 -o "$work/gemm-static" examples/c/gemm.c ${static/-lhighwater/-l:libhighwater.a}
! ldd "$work/gemm-static" | grep highwater || fail 'the static example needs the shared library'
[ "$("$work/gemm-static")" = '[58, 64, 139, 154]' ] || fail 'the static example prints something else'
echo "cargo-c: ok, $(cargo cinstall --version | head -n 1)"

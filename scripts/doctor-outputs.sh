#!/usr/bin/env bash
# Prints what `highwater doctor` says on a machine with nothing, with broken plugins and with a good one: the outputs that stand in
# docs/plugins.md. Usage: scripts/doctor-outputs.sh [--write | --check]
#
# --write puts them there; --check fails where the page has others. Without a GPU and its libraries; needs a C compiler. Works in
# /tmp/highwater-doctor, which must not be there, so that paths are the same each time.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
case ${1:-} in '' | --write | --check) ;; *) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2 ;; esac

target=${CARGO_TARGET_DIR:-target}
cargo build --quiet --locked --release -p highwater-cli
scratch=/tmp/highwater-doctor
mkdir "$scratch" || { echo "doctor-outputs: $scratch is there already; remove it" >&2; exit 1; }
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch"/{bin,broken,good}
cp "$target/release/highwater" "$scratch/bin/"
make --quiet -C examples/c-backend clean libhighwater_c.so
mv examples/c-backend/libhighwater_c.so "$scratch/good/"

manifest() { # name, library, first version of the table
  printf 'name = "%s"\nversion = "0.1.0"\nvendor = "Acme Laboratories"\nlicence = "MIT"\ntable_versions = { min = %s, max = %s }\n\n' "$1" "$3" "$3"
  printf '[library]\n%s-linux = "%s"\n' "$(uname -m)" "$2"
}
manifest c libhighwater_c.so 1 >"$scratch/good/c.toml"
# Cut off, no plugin, of another version of the table, crashing when it is loaded, and with a misspelt key.
head -c 40 "$scratch/good/libhighwater_c.so" >"$scratch/broken/libcut.so"
manifest cut libcut.so 1 >"$scratch/broken/cut.toml"
echo 'int nothing;' | cc -shared -fPIC -x c - -o "$scratch/broken/libother.so"
manifest other libother.so 1 >"$scratch/broken/other.toml"
manifest newer libnewer.so 7 >"$scratch/broken/newer.toml"
cp "$scratch/good/libhighwater_c.so" "$scratch/broken/libnewer.so"
echo '#include <stdlib.h>
__attribute__((constructor)) static void construct(void) { abort(); }' | cc -shared -fPIC -x c - -o "$scratch/broken/libcrash.so"
manifest crash libcrash.so 1 >"$scratch/broken/crash.toml"
manifest typo libtypo.so 1 | sed 's/^vendor/vendro/' >"$scratch/broken/typo.toml"

doctor() { # variables
  echo '```console'
  local status=0
  echo "\$ ${1:+$1 }highwater doctor"
  # Nothing of this machine's environment, so that the output is the same everywhere.
  env -i PATH=/usr/bin:/bin HOME="$scratch/home" COLUMNS=110 ${1:+"$1"} "$scratch/bin/highwater" doctor 2>&1 || status=$?
  echo "\$ echo \$?"
  echo "$status"
  echo '```'
}
outputs() {
  printf '### With nothing\n\nNo vendor library and no plugin. The mock needs neither.\n\n'
  doctor ''
  printf '\n### With broken plugins\n\nFive plugins, each broken in a different way. The report names each fault, and the mock still works.\n\n'
  doctor "HIGHWATER_PLUGIN_PATH=$scratch/broken"
  printf '\n### With a working plugin\n\nThe example in C.\n\n'
  doctor "HIGHWATER_PLUGIN_PATH=$scratch/good"
}
begin='<!-- made by scripts/doctor-outputs.sh --write -->' end='<!-- end of what scripts/doctor-outputs.sh makes -->'
page=docs/plugins.md
case ${1:-} in
  '') outputs ;;
  *)
    {
      sed "\|^$begin\$|q" "$page"
      echo
      outputs
      echo
      sed -n "\|^$end\$|,\$p" "$page"
    } >"$scratch/page.md"
    if [ "$1" = --write ]; then
      cp "$scratch/page.md" "$page"
    elif ! diff -u "$page" "$scratch/page.md"; then
      echo "doctor-outputs: docs/plugins.md has other outputs; look at them, then run scripts/doctor-outputs.sh --write" >&2
      exit 1
    else
      echo "doctor-outputs: ok"
    fi
    ;;
esac

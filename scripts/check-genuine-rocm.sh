#!/usr/bin/env bash
# Checks what the ROCm backend takes for granted against AMD's own libraries, version 6 and 7, without a device.
# Usage: scripts/check-genuine-rocm.sh [--as-is] [FOLDER]
#
#   --as-is  checks what an earlier run unpacked, without asking the mirror
#   FOLDER   where the packages go (target/genuine-rocm): about 1.8 GB to fetch, 4 GB on disk
#
# Debian builds these libraries. They are fetched by an apt with a state of its own, which checks signatures and hashes, and
# unpacked with the C library they need: nothing is installed and no root is needed. What runs over them runs through that
# C library's loader: backend-rocm/examples/genuine.rs, call by call, and `highwater doctor`, which is the backend itself.
#
# One line per fact: version, fact, expected, seen, and `ok` or `DIFFERENT`; exits 1 if one is different.
#
#   DEBIAN_MIRROR   a mirror of Debian's packages (the first that this machine's apt uses), or a day of Debian's snapshot
#                   archive where the packages have moved on
#   DEBIAN_KEYRING  Debian's keys (/usr/share/keyrings/debian-archive-keyring.gpg, of the package debian-archive-keyring)
set -euo pipefail

fail() { echo "genuine: $1" >&2; exit 2; }
usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2
  exit 2
}
root=$(cd "$(dirname "$0")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
case $target in /*) ;; *) target=$PWD/$target ;; esac
as_is=
folder=
for argument in "$@"; do
  case $argument in
    --as-is) as_is=1 ;;
    -*) usage ;;
    *)
      [ -z "$folder" ] || usage
      folder=$argument
      ;;
  esac
done
folder=${folder:-$target/genuine-rocm}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 2>/dev/null | head -n 1)}
keyring=${DEBIAN_KEYRING:-/usr/share/keyrings/debian-archive-keyring.gpg}

[ "$(uname -m)" = x86_64 ] || fail "the packages are for x86_64, this is $(uname -m)"
[ ! -e /dev/kfd ] || fail "there is an AMD device here (/dev/kfd); these are facts about having none"
for tool in python3 dpkg-deb apt-get; do
  command -v "$tool" >/dev/null || { [ -n "$as_is" ] && [ "$tool" != python3 ]; } || fail "$tool is missing"
done

# --- the packages

prepare_apt() {
  [ -n "$mirror" ] || fail "this machine's apt has no mirror: set DEBIAN_MIRROR"
  [ -r "$keyring" ] || fail "$keyring is missing: install debian-archive-keyring, or set DEBIAN_KEYRING"
  mkdir -p "$folder/apt/etc" "$folder/apt/state/lists/partial" "$folder/apt/cache/archives/partial"
  # Nothing is installed as far as this apt knows, so the closure is whole.
  : >"$folder/apt/status"
  for suite in sid experimental; do
    echo "deb [arch=amd64 signed-by=$keyring] $mirror $suite main"
  done >"$folder/apt/etc/sources.list"
  # An index of a snapshot is always past its date; signatures and hashes are checked all the same.
  cat >"$folder/apt/apt.conf" <<CONF
Dir "$folder/apt";
Dir::Etc "etc";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::State "state";
Dir::State::status "$folder/apt/status";
Dir::Cache "cache";
APT::Architecture "amd64";
APT::Architectures { "amd64"; };
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Check-Valid-Until "false";
Acquire::Languages "none";
Acquire::Retries "3";
Debug::NoLocking "true";
CONF
  export APT_CONFIG=$folder/apt/apt.conf
  apt-get update -qq >&2 || fail "no index from $mirror"
}

unpack() { # version, arguments of apt-get install
  local version=$1 into=$folder/$1 name number package
  shift
  # The plan is the list of packages with their versions: what it names already is not fetched again.
  apt-get install -s "$@" >"$folder/apt/plan" 2>&1 || { cat "$folder/apt/plan" >&2; fail "no set of packages for version $version on $mirror"; }
  sed -n 's/^Inst \([^ ]*\) (\([^ ]*\) .*/\1 \2/p' "$folder/apt/plan" >"$folder/apt/list"
  if cmp -s "$folder/apt/list" "$into/packages"; then return; fi
  rm -rf "$into"
  mkdir -p "$into"
  apt-get install -y -qq --download-only "$@" >&2 || fail "version $version could not be fetched"
  while read -r name number; do
    package=$(echo "$folder/apt/cache/archives/${name}_${number//:/%3a}_"*.deb)
    # Left out is what no loader looks at; rocBLAS's kernels are most of it.
    dpkg-deb --fsys-tarfile "$package" | tar -x -C "$into" --exclude=./usr/share --exclude=./usr/include \
      --exclude=./usr/lib/x86_64-linux-gnu/rocblas --exclude=./usr/lib/x86_64-linux-gnu/gconv --exclude=./usr/lib/x86_64-linux-gnu/hipblaslt
  done <"$folder/apt/list"
  # Last: it says that the rest is whole.
  cp "$folder/apt/list" "$into/packages"
  rm -f "$folder"/apt/cache/archives/*.deb
}

if [ -z "$as_is" ]; then
  prepare_apt
  unpack 6 libamdhip64-6 libhipblas2 libhipblaslt1
  unpack 7 -t experimental libamdhip64-7 libhipblas3 libhipblaslt1
fi
for version in 6 7; do
  [ -e "$folder/$version/packages" ] || fail "$folder/$version is not there: run this without --as-is"
done

# --- what runs over them

(cd "$root" && export CARGO_TARGET_DIR=$target &&
  cargo build --quiet --release --locked -p highwater-rocm --example genuine >&2 &&
  cargo build --quiet --release --locked --bin highwater >&2)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
unset HIGHWATER_HIP_LIBRARY HIGHWATER_HIPBLAS_LIBRARY LD_LIBRARY_PATH LD_PRELOAD

libraries() { echo "$folder/$1/usr/lib/x86_64-linux-gnu"; }
fact() { # version, fact, expected, seen
  local verdict=ok
  [ "$3" = "$4" ] || verdict=DIFFERENT
  printf '%-3s %-56s %-38s %-38s %s\n' "$1" "$2" "$3" "$4" "$verdict"
}
# Runs a program through the loader of a version, over the libraries in one folder.
through_loader() { # version, folder, program, arguments
  local loader
  loader=$(libraries "$1")/ld-linux-x86-64.so.2
  "$loader" --library-path "$2" "${@:3}"
}
# Runs a part of the checker, and says how its process ended.
part() { # version, folder, part, arguments
  local status=0 said
  through_loader "$1" "$2" "$target/release/examples/genuine" "$1" "${@:3}" 2>"$scratch/said" || status=$?
  # 1 is its way to say that a fact is different.
  [ "$status" -ne 1 ] || status=0
  said=$(head -c 200 "$scratch/said" | tr '\n' ' ')
  fact "$1" "$3: the process ends well and prints nothing" "0, nothing" "$status, ${said:-nothing}"
}
# hipBLASLt has no device memory here, and ends the process for that.
lt_create() { # version, folder
  local status=0 said
  through_loader "$1" "$2" "$target/release/examples/genuine" "$1" lt-create 2>"$scratch/said" || status=$?
  said=$(head -c 200 "$scratch/said" | tr '\n' ' ' | sed "s/ at .*//")
  fact "$1" "hipblasLtCreate: how the process ends" "1, Hip error: 'no ROCm-capable device is detected'(100)" "$status, ${said:-nothing}"
}
# What the backend says of itself: the outcome, and whether a word stands in the reason or in what the loader said.
doctor() { # version, fact, folder, expected outcome, expected word
  local status=0 said seen
  through_loader "$1" "$3" "$target/release/highwater" doctor --json >"$scratch/doctor" 2>"$scratch/said" || status=$?
  said=$(head -c 200 "$scratch/said" | tr '\n' ' ')
  seen=$(python3 - "$scratch/doctor" "$5" <<'PYTHON'
import json, sys
try:
    with open(sys.argv[1], encoding="utf-8") as file:
        backends = json.load(file)["backends"]
    rocm = next(backend for backend in backends if backend["name"] == "rocm")
    said = [rocm["reason"]] + [f"{failure['name']}: {failure['reason']}" for failure in rocm["tried"]]
    print(rocm["outcome"] + ": " + (sys.argv[2] if any(sys.argv[2] in text for text in said) else said[0]))
except (ValueError, KeyError, StopIteration) as error:
    print(f"no report: {error!r}")
PYTHON
)
  fact "$1" "highwater doctor$2" "$4: $5" "$seen"
  fact "$1" "highwater doctor$2: status and standard error" "0, nothing" "$status, ${said:-nothing}"
}
# A folder with the libraries of a version but for one.
without() { # version, library
  local into=$scratch/$1-without-$2
  mkdir -p "$into"
  ln -sf "$(libraries "$1")"/*.so* "$into/"
  rm "$into/$2"*
  echo "$into"
}

{
  for version in 6 7; do
    whole=$(libraries "$version")
    [ "$version" = 6 ] && hip=libamdhip64.so.6 || hip=libamdhip64.so.7
    part "$version" "$whole" calls
    part "$version" "$whole" init
    part "$version" "$whole" blas
    part "$version" "$whole" lt
    lt_create "$version" "$whole"
    part "$version" "$whole" symbols
    hsa=libhsa-runtime64.so.1
    part "$version" "$(without "$version" "$hsa")" missing "$hsa"
    part "$version" "$(without "$version" "$hip")" missing "$hip"
    doctor "$version" "" "$whole" "no device" hipErrorNoDevice
    doctor "$version" " without $hsa" "$(without "$version" "$hsa")" "library missing" "$hsa"
    doctor "$version" " without $hip" "$(without "$version" "$hip")" "library missing" "$hip"
  done
  # Both versions at once, over what the two have in common from one of them. The newer C library serves both.
  mkdir "$scratch/both"
  for version in 7 6; do ln -sf "$(libraries "$version")"/*.so* "$scratch/both/"; done
  for file in "$(libraries 7)"/{ld-linux-x86-64,libc,libm,libdl,libpthread,librt,libmvec,libresolv,libutil}.so*; do
    ln -sf "$file" "$scratch/both/"
  done
  part 7 "$scratch/both" majors "$(libraries 6)/libamdhip64.so.6" "$(libraries 7)/libamdhip64.so.7"
} | tee "$scratch/facts"

facts=$(grep -c . "$scratch/facts")
if different=$(grep -c 'DIFFERENT$' "$scratch/facts"); then
  echo "genuine: $different of $facts facts are different" >&2
  exit 1
fi
echo "genuine: $facts facts hold"

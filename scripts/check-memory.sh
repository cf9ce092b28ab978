#!/usr/bin/env bash
# Looks for errors of memory use with tools that watch every access. Usage: scripts/check-memory.sh [quick|all]
#
#   quick  address sanitizer over the mock's tests, those with several processes included, and valgrind over
#          the examples in C where it is installed (what CI runs)
#   all    that, address sanitizer over core's tests, and valgrind over the mock's tests
#
# Needs a nightly toolchain (installed when it is missing) and, for `all`, valgrind.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-quick}
host=$(rustc -vV | sed -n 's/^host: //p')
rustup toolchain list | grep -q '^nightly' || rustup toolchain install nightly --profile minimal
build=${CARGO_TARGET_DIR:-target}

sanitize() {
  # A target of its own: everything is compiled differently.
  RUSTFLAGS="-Zsanitizer=address" CARGO_TARGET_DIR="$build/sanitized" \
    cargo +nightly test --quiet --target "$host" --locked --tests "$@"
}

printf '=== address sanitizer: the mock\n'
sanitize -p highwater-mock

if command -v valgrind >/dev/null; then
  printf '=== valgrind: the C library\n'
  programs=$(realpath "$build")/c-examples
  for example in gemm threads graph share hand_over load_weights; do
    make -s -C examples/c BUILD="$programs" "$programs/$example"
    HIGHWATER_BACKEND=mock valgrind --quiet --trace-children=yes --error-exitcode=9 --leak-check=full --show-leak-kinds=definite \
      --errors-for-leak-kinds=definite "$programs/$example" >/dev/null
  done
else
  printf 'valgrind is not installed: the C library was left out\n'
fi
[ "$what" = all ] || exit 0

printf '=== address sanitizer: core\n'
# Without the search for leaks: some tests forget objects on purpose, or fork and leave the child's copies behind. The
# model checkers run on stacks of their own, which the sanitizer does not know.
ASAN_OPTIONS=detect_leaks=0 sanitize -p highwater-core -p highwater-hal -p highwater-driver --lib --test sharing --test capture --test host_cache --test host_pieces \
  --test regressions --test schedules --test turn --test exit --test bad_input

printf '=== valgrind: the mock\n'
command -v valgrind >/dev/null || { echo "valgrind is not installed (Debian: apt-get install valgrind)" >&2; exit 1; }
# Left out is what valgrind does not emulate: pidfd_open (tests about other processes), MADV_WIPEONFORK (tests that fork), and
# the speed of a processor.
left_out=(--skip sharing --skip shared_event --skip peers::tests --skip forked --skip a_child_has_come_and_gone --skip takes_no_time)
cargo test --quiet -p highwater-mock --tests --no-run --locked
cargo test -p highwater-mock --tests --no-run --locked --message-format=json 2>/dev/null |
  sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | sort -u | while read -r tests; do
  (cd backend-mock && valgrind --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite \
    --errors-for-leak-kinds=definite "$tests" --quiet --test-threads=2 "${left_out[@]}" </dev/null)
done
printf 'no errors\n'

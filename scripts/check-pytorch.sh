#!/usr/bin/env bash
# Shares 1,000 tensors with PyTorch each way, and kills either side; and from PyTorch's expandable segments. Needs a GPU and a
# Python with PyTorch; needs no Rust.
#
#   cargo build --examples
#   scripts/check-pytorch.sh target/debug/examples PYTHON
#
# The folder has the programs to_pytorch and from_pytorch. Prints each check. The exit status is 1 if one failed. TENSORS=100
# shares fewer.
set -uo pipefail
[ $# -eq 2 ] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
programs=$1 python=$2
examples=$(cd "$(dirname "$0")/../examples" && pwd)
for program in to_pytorch from_pytorch; do
  [ -x "$programs/$program" ] || { echo "check-pytorch: there is no program $programs/$program" >&2; exit 2; }
done
programs=$(cd "$programs" && pwd)

# Highwater finds the vendor's libraries beside PyTorch.
export VIRTUAL_ENV=${VIRTUAL_ENV:-$("$python" -c 'import sys; print(sys.prefix)')}
date -u +'%Y-%m-%d %H:%M UTC'
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader 2>/dev/null
failed=
run() { # direction, settings of PyTorch's allocator
  local started=$SECONDS status=0
  PYTORCH_CUDA_ALLOC_CONF=$2 timeout 120 "$python" "$examples/$1_pytorch.py" "$programs/$1_pytorch" 2>&1 || status=$?
  [ "$status" -eq 0 ] || failed+=" $1 $2 (exit status $status)"
  echo "   $((SECONDS - started)) s"
}
run to expandable_segments:False
run from expandable_segments:False
run from expandable_segments:True
[ -z "$failed" ] || { echo "check-pytorch: FAILED:$failed"; exit 1; }
echo "check-pytorch: passed both ways"

#!/usr/bin/env bash
# Runs the kernel tests under every compiler, build type and sanitizer that can be had here, and a part of the
# package's tests under every torch, and writes the results as a table to docs/matrix.md. A row whose compiler or
# torch cannot be had is written down as such, and so is one that takes too long; neither stops the others.
#
#   bash scripts/matrix.sh [PATTERN]   only the rows whose names match the extended regular expression; the others
#                                      stay as they were written last
#   KERNEL_SETS    of the instruction sets, those of the kernel tests; default: all
#   KERNEL_SHARE   n: an n-th of the kernel tests by their work, others on each set; default: 1, all of them
#   ROW_SECONDS    how long a row may take; default: 3600
#   TORCHES        versions of torch; default: 2.11.0 2.12.0 2.13.0 2.14.0 2.15.0
#   PART           what of the tests runs with each torch; default: tests/test_forward.py tests/test_backward.py
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
pattern="${1:-.}"
limit="${ROW_SECONDS:-3600}"
table="$root/docs/matrix.md"
before="$(cat "$table" 2>/dev/null || true)"
logs="$root/build/matrix"
mkdir -p "$logs"
export ATTN_EXT_WERROR=ON

write() {
  printf '| %s | %s | %s | %s |\n' "$@" "$(date +%F)" | tee -a "$table"
}

# left_out NAME: whether the pattern leaves the row out, which then says what it said last, instruction sets and all.
left_out() {
  if grep -qE "$pattern" <<<"$1"; then return 1; fi
  grep -F "| $1 |" <<<"$before" >>"$table" || printf '| %s | - | not run | |\n' "$1" >>"$table"
}

# row NAME VERSION COMMAND...: runs it and writes down how it ended.
row() {
  local name="$1" version="$2" start=$SECONDS code=0 result
  shift 2
  timeout "$limit" "$@" >"$logs/${name//[^A-Za-z0-9.+-]/_}.log" 2>&1 || code=$?
  case $code in
    0) result="passed" ;;
    124) result="not finished after $limit s" ;;
    *) result="FAILED (exit status $code)" ;;
  esac
  write "$name" "$version" "$result, $((SECONDS - start)) s"
}

# kernels COMPILER NAME SANITIZER VARIABLE=VALUE...
kernels() {
  local compiler="$1" name="kernels, $1, $2" sanitizer="$3"
  shift 3
  if left_out "$name"; then return; fi
  if ! command -v "$compiler" >/dev/null; then
    write "$name" "-" "no such compiler here"
    return
  fi
  row "$name" "$("$compiler" --version | head -1), ${KERNEL_SETS:-all sets}${KERNEL_SHARE:+, one case in $KERNEL_SHARE on each}" env CXX="$compiler" "$@" "$root/scripts/kernel_tests.sh" "$sanitizer"
}

# with_torch VERSION [HOW VARIABLE=VALUE...]: in an environment of its own, with a CPU build of torch: one that asks
# for CUDA's libraries is left alone.
with_torch() {
  local version="$1" how="${2:-}" wanted name="package, torch $1${2:+, $2}"
  local venv="$logs/torch-$version${how:+-${how//[^A-Za-z0-9+]/}}"
  shift $(($# < 2 ? $# : 2))
  if left_out "$name"; then return; fi
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --upgrade pip
  # Without its dependencies the wheel itself is fetched at most, and asked what it needs.
  if ! "$venv/bin/python" -m pip install --quiet --dry-run --ignore-installed --no-deps --report "$logs/torch.json" "torch==$version"; then
    write "$name" "-" "cannot be had"
    return
  fi
  wanted="$(python3 -c '
import json, sys
(wheel,) = json.load(open(sys.argv[1]))["install"]
print(wheel["metadata"]["version"], *[r for r in wheel["metadata"].get("requires_dist", []) if r.startswith("nvidia")])
' "$logs/torch.json")"
  if [[ "$wanted" == *nvidia* ]]; then
    write "$name" "${wanted%% *}" "no CPU wheel can be had"
    return
  fi
  "$venv/bin/python" -m pip install --quiet "torch==$version"
  # shellcheck disable=SC2086  # a word for each file
  row "$name" "${wanted%% *}" env ATTN_EXT_VENV="$venv" "$@" "$root/scripts/test.sh" ${PART:-tests/test_forward.py tests/test_backward.py}
}

cat >"$table" <<EOF
# Compilers, sanitizers and versions of torch

Written by \`scripts/matrix.sh\` on $(uname -m), $(. /etc/os-release && echo "$PRETTY_NAME"), glibc $(getconf GNU_LIBC_VERSION | cut -d' ' -f2), each row on its own
day. The kernel tests name the instruction sets that they ran; warnings are errors. "not run" says what it says.

| what | version | result | when |
|---|---|---|---|
EOF

for compiler in g++ g++-11 clang++-14 clang++-15 clang++-16 clang++-19; do
  kernels "$compiler" "Release" none
done
for compiler in g++ clang++-14; do
  kernels "$compiler" "Debug" none BUILD_TYPE=Debug
  kernels "$compiler" "Release with -D_GLIBCXX_ASSERTIONS" none CXXFLAGS=-D_GLIBCXX_ASSERTIONS
  kernels "$compiler" "Release with -march=native" none CXXFLAGS=-march=native
  kernels "$compiler" "ThreadSanitizer" thread
  kernels "$compiler" "AddressSanitizer and UndefinedBehaviorSanitizer" address,undefined
done
for version in ${TORCHES:-2.11.0 2.12.0 2.13.0 2.14.0 2.15.0}; do
  with_torch "$version"
done
with_torch 2.13.0 "clang++-14" CXX=clang++-14
with_torch 2.13.0 "Debug" CMAKE_ARGS=-DCMAKE_BUILD_TYPE=Debug
with_torch 2.13.0 "-D_GLIBCXX_ASSERTIONS" CXXFLAGS=-D_GLIBCXX_ASSERTIONS

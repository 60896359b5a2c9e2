#!/usr/bin/env bash
# Builds the kernels' own tests, without torch or Python, under sanitizers and runs them on every instruction set
# that this machine has. The argument is what -fsanitize= takes: address,undefined (the default), thread, or none.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
sanitize="${1-address,undefined}"
[[ "$sanitize" != none ]] || sanitize=""
build="$root/build/csrc${sanitize:+-${sanitize//,/-}}"
jobs="$(nproc)"

cmake -S "$root/tests/csrc" -B "$build" -DATTN_EXT_SANITIZE="$sanitize" -DATTN_EXT_WERROR="${ATTN_EXT_WERROR:-OFF}"
cmake --build "$build" --parallel "$jobs"
ctest --test-dir "$build" --parallel "$jobs" --output-on-failure --no-tests=error

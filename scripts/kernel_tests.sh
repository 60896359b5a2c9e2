#!/usr/bin/env bash
# Builds the kernels' own tests, without torch or Python, under sanitizers and runs them on every instruction set
# that this machine has. The argument is what -fsanitize= takes: address,undefined (the default), thread, or none.
#
#   CXX              the compiler, which has a build folder of its own
#   CXXFLAGS         more flags for it
#   KERNEL_SETS      of the instruction sets, those to build and run, as in "baseline;avx2"; default: all
#   KERNEL_SHARE     n: an n-th of the cases by their work, others on each set, and each header alone on one set;
#                    default: 1, all of them
#   BUILD_TYPE       Release or Debug, where no sanitizer chooses; default: Release
#   ATTN_EXT_WERROR  ON: every C++ warning is an error
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
sanitize="${1-address,undefined}"
[[ "$sanitize" != none ]] || sanitize=""
flavour="${CXX:+-$(basename "$CXX")}${sanitize:+-${sanitize//,/-}}${BUILD_TYPE:+-$BUILD_TYPE}"
[[ -z "${CXXFLAGS:-}" ]] || flavour+="-$(cksum <<<"$CXXFLAGS" | cut -d' ' -f1)"
build="$root/build/csrc$flavour"
jobs="$(nproc)"

# Make would wait for the whole library before it compiles what is linked with it.
if command -v ninja >/dev/null && [[ ! -e "$build/CMakeCache.txt" ]]; then export CMAKE_GENERATOR=Ninja; fi
cmake -S "$root/tests/csrc" -B "$build" -DATTN_EXT_SANITIZE="$sanitize" -DATTN_EXT_WERROR="${ATTN_EXT_WERROR:-OFF}" \
  -DATTN_EXT_KERNEL_SETS="${KERNEL_SETS:-}" -DCMAKE_BUILD_TYPE="${BUILD_TYPE:-}" \
  -DATTN_EXT_HEADERS_ALONE="$([[ "${KERNEL_SHARE:-1}" == 1 ]] && echo ON || echo SHARED)"
cmake --build "$build" --parallel "$jobs"
ctest --test-dir "$build" --parallel "$jobs" --output-on-failure --no-tests=error

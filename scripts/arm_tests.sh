#!/usr/bin/env bash
# The kernel tests on Arm's instruction sets, warnings as errors: cross-compiled, and run in QEMU. Headers alone are
# left to scripts/kernel_tests.sh. For root on Debian and Ubuntu the cross compiler and QEMU are installed where they
# are missing. Where they are not to be had, it says so and ends with 77: nothing was checked.
#
#   KERNEL_SETS      of the instruction sets, those to build and run; default: "neon;neon_bf16"
#   KERNEL_SHARE     n: an n-th of the cases by their work, others on each set;
#                    default: 1, all of them, which takes hours
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

is_there() {
  command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null
}

install_them() {
  [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null || return 1
  echo "Installing a cross compiler and QEMU with apt-get"
  {
    apt-get update -qq &&
      DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends g++-aarch64-linux-gnu qemu-user
  } >/dev/null
}

if ! is_there && { ! install_them || ! is_there; }; then
  echo "SKIPPED: no aarch64-linux-gnu-g++ or no qemu-aarch64 on PATH, and they could not be installed." \
    "Nothing was checked for Arm." >&2
  exit 77
fi
aarch64-linux-gnu-g++ --version | head -1
qemu-aarch64 --version | head -1

# The dynamic linker and the libraries of the other architecture.
export QEMU_LD_PREFIX="${QEMU_LD_PREFIX:-/usr/aarch64-linux-gnu}"
build="$root/build/csrc-aarch64"
jobs="$(nproc)"
cmake -S "$root/tests/csrc" -B "$build" -DCMAKE_TOOLCHAIN_FILE="$root/cmake/aarch64-linux-gnu.cmake" \
  -DATTN_EXT_WERROR=ON -DATTN_EXT_HEADERS_ALONE=OFF -DATTN_EXT_KERNEL_SETS="${KERNEL_SETS-neon;neon_bf16}"
cmake --build "$build" --parallel "$jobs"
NM=aarch64-linux-gnu-nm OBJDUMP=aarch64-linux-gnu-objdump python3 "$root/scripts/check_kernel_symbols.py" "$build"
ctest --test-dir "$build" --parallel "$jobs" --output-on-failure --no-tests=error

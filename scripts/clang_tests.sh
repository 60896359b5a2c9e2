#!/usr/bin/env bash
# With Clang, warnings as errors: the kernel tests on one instruction set, under sanitizers where Clang comes with their
# runtime, and the library and the Python module (-O0: they are compiled, not run; the library file by file, as CI does
# nowhere else, and each set's kernels as one). CXX names the compiler; else the newest on PATH is taken, or, for root
# on Debian and Ubuntu, installed. Where none is to be had, it says so and ends with 77: nothing was checked.
# --sanitizers: says which there are, or none, and does nothing else.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

find_clang() {
  local name
  for name in ${CXX:-} clang++-{30..14} clang++; do
    if command -v "$name" >/dev/null && "$name" --version | grep -q clang; then
      echo "$name"
      return
    fi
  done
  return 1
}

install_clang() {
  [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null || return 1
  echo "Installing Clang with apt-get"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -qq -y --no-install-recommends clang; } >/dev/null || return 1
  apt-get install -qq -y --no-install-recommends libclang-rt-dev >/dev/null || echo "without the sanitizers' runtime"
}

if ! clang="$(find_clang)"; then
  if ! install_clang || ! clang="$(find_clang)"; then
    echo "SKIPPED: no clang++ on PATH, and none could be installed. Nothing was checked with Clang." >&2
    exit 77
  fi
fi
sanitize=address,undefined
"$clang" -fsanitize="$sanitize" -x c++ -o /dev/null - <<<'int main() {}' 2>/dev/null || sanitize=none
if [[ "${1:-}" == --sanitizers ]]; then
  echo "$sanitize"
  exit
fi
"$clang" --version | head -1
echo "sanitizers: $sanitize"

CXX="$clang" ATTN_EXT_WERROR=ON KERNEL_SETS="${KERNEL_SETS:-avx2}" "$root/scripts/kernel_tests.sh" "$sanitize"

install_attn_ext test
build="$root/build/clang"
PATH="$PATH:$venv/bin"
torch="$("$venv/bin/python" -c 'import torch; print(torch.utils.cmake_prefix_path)')"
cmake -S "$root" -B "$build" -G Ninja -DCMAKE_CXX_COMPILER="$clang" -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_FLAGS=-O0 \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=6 -DATTN_EXT_WERROR=ON -DATTN_EXT_PYTHON=ON \
  -DPython_EXECUTABLE="$venv/bin/python" -DCMAKE_PREFIX_PATH="$torch"
cmake --build "$build"

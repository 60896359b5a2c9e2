#!/usr/bin/env bash
# The package on Arm: cross-compiled, warnings as errors, against torch's wheel for aarch64, and its tests run in QEMU
# by the Python of an unpacked Debian for arm64. Arguments go to pytest; default: the tests of values, of gradients and
# of modules. For root on Debian; the cross compiler and QEMU are installed where they are missing. Nothing else of
# the machine is touched: all is below build/aarch64, and what is there already is not fetched again.
#
# It takes 500 MB of downloads, most of them the wheel, 2.5 GB of disk (1.4 GB afterwards) and, on two cores, some ten
# minutes for the build and as many for the tests. The wheel that pip finds is a CUDA build: stand-ins take the place of
# CUDA's libraries (stub_libraries.py), and torch finds no device. Where something cannot be had, it says so and ends
# with 77: nothing was checked.
#
#   TORCH            the version; default: 2.13.0
#   QEMU_CPU         the processor, as QEMU names it; default: max, which has neon_bf16; neoverse-n1 has neon alone. On
#                    those of armv8.0, such as cortex-a72, torch 2.13's own float64 product is an illegal instruction
#   PART             what runs without arguments; default: tests/test_forward.py tests/test_backward.py tests/test_modules.py
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
torch="${TORCH:-2.13.0}"
export QEMU_CPU="${QEMU_CPU:-max}"
export PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH PYTHONHOME

work="$root/build/aarch64"
userland="$work/userland"
python="$work/python"
package="$work/package"

skip() {
  echo "SKIPPED: $* Nothing was checked for Arm." >&2
  exit 77
}

is_there() {
  local program
  for program in aarch64-linux-gnu-g++ qemu-aarch64 cmake ninja dpkg-deb python3; do
    command -v "$program" >/dev/null || return 1
  done
}

if ! is_there && [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
  echo "Installing a cross compiler and QEMU with apt-get"
  {
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
      apt-get install -qq -y --no-install-recommends cmake g++-aarch64-linux-gnu ninja-build python3-pip qemu-user
  } >/dev/null || true
fi
is_there || skip "no aarch64-linux-gnu-g++, qemu-aarch64, cmake, ninja or dpkg-deb on PATH, and they could not be installed."
aarch64-linux-gnu-g++ --version | head -1
qemu-aarch64 --version | head -1

# apt-get with lists and a cache of its own, as if nothing were installed.
foreign_apt() {
  apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Sandbox::User=root \
    -o Dir::State="$work/apt" -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt/cache" "$@"
}

unpack_userland() {
  local archive
  mkdir -p "$work"/apt/{lists,cache/archives}/partial
  : >"$work/apt/status"
  foreign_apt update && foreign_apt install -y --no-install-recommends --download-only \
    python3 libpython3-dev libgomp1 libstdc++6 >/dev/null || return 1
  rm -rf "$userland" "$userland.part"
  mkdir "$userland.part"
  for archive in "$work"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$archive" "$userland.part"
  done
  mv "$userland.part" "$userland"
}

if [[ ! -e "$userland" ]]; then
  echo "Unpacking Python for arm64"
  unpack_userland || skip "apt-get has no Python for arm64."
fi
name="$(basename "$(readlink "$userland/usr/bin/python3")")" # such as python3.11
site="$userland/usr/local/lib/$name/dist-packages"
ln -sfn ../aarch64-linux-gnu "$userland/usr/include/$name/aarch64-linux-gnu" # where its pyconfig.h is looked for

# What torch asks Linux about the processor. The real answers would be this machine's, of another family.
mkdir -p "$userland/proc"
: >"$userland/proc/cpuinfo"
for cpu in 0 1; do
  printf '%s\t: %s\n' processor $cpu Features 'fp asimd' 'CPU implementer' 0x41 'CPU architecture' 8 \
    'CPU variant' 0x1 'CPU part' 0xd0c 'CPU revision' 1 >>"$userland/proc/cpuinfo"
  echo >>"$userland/proc/cpuinfo"
  identification="$userland/sys/devices/system/cpu/cpu$cpu/regs/identification"
  mkdir -p "$identification"
  echo 0x00000000411fd0c1 >"$identification/midr_el1"
done
echo 0-1 | tee "$userland"/sys/devices/system/cpu/{possible,present} >/dev/null

# A program of this machine that is the other's Python: so that tests can start it as well.
cat >"$python" <<SCRIPT
#!/bin/sh
exec qemu-aarch64 -L "$userland" "$userland/usr/bin/$name" "\$@"
SCRIPT
chmod +x "$python"

install_for_arm() {
  python3 -m pip install --quiet --target "$1" --only-binary=:all: --implementation cp \
    --python-version "${name#python}" --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 \
    --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 "${@:2}"
}

if [[ "$(cat "$work/torch-version" 2>/dev/null)" != "$torch" ]]; then
  echo "Fetching torch $torch for aarch64"
  rm -rf "$site" "$work/site"
  # Without what its metadata name: CUDA, which would be some gigabytes.
  install_for_arm "$work/site" --no-deps "torch==$torch" || skip "pip has no torch $torch for aarch64 and $name."
  install_for_arm "$work/others" 'filelock' 'fsspec' 'jinja2' 'networkx' 'sympy>=1.13.3' 'typing-extensions>=4.10' \
    'hypothesis>=6.100' 'numpy>=1.26' 'pytest>=8' || skip "pip has not all that the tests need for aarch64 and $name."
  cp -r "$work/others/." "$work/site"
  rm -rf "$work/others"
  if [[ -e "$work/site/torch/lib/libtorch_cuda.so" ]]; then
    python3 "$root/scripts/stub_libraries.py" "$work/site/torch/lib" "$userland" "$work/site/nvidia/cu13/lib" >/dev/null
  fi
  mkdir -p "$(dirname "$site")"
  mv "$work/site" "$site"
  echo "$torch" >"$work/torch-version"
fi
printf 'import sys; sys.executable = "%s"\n%s\n' "$python" "$package" >"$site/attn_ext.pth"

echo "Building"
cmake -S "$root" -B "$work/build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$root/cmake/aarch64-linux-gnu.cmake" \
  -DATTN_EXT_WERROR=ON -DATTN_EXT_PYTHON=ON -DATTN_EXT_TORCH_DIR="$site/torch" \
  -DPython_EXECUTABLE="$python" -DPython_INCLUDE_DIR="$userland/usr/include/$name" -DCMAKE_INSTALL_LIBDIR=lib
cmake --build "$work/build" --parallel "$(nproc)"
rm -rf "$package"
mkdir "$package"
tar -C "$root" -c --exclude-vcs --exclude='./.venv*' --exclude=./build --exclude='*.so' . | tar -C "$package" -x
cmake --install "$work/build" --prefix "$package/attn_ext" >/dev/null

cd "$package"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
"$python" -c 'import attn_ext, torch; print(torch.__version__, *attn_ext.available_cpu_capabilities())'
if (($# == 0)); then
  read -ra part <<<"${PART:-tests/test_forward.py tests/test_backward.py tests/test_modules.py}"
  set -- "${part[@]}"
fi
exec "$python" -m pytest -q "$@"

#!/usr/bin/env bash
# Installs the C++ library into build/cpp/install, builds examples/cpp against that install and runs them.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_attn_ext test
build="$root/build/cpp"
torch="$("$venv/bin/python" -c 'import torch; print(torch.utils.cmake_prefix_path)')"
PATH="$PATH:$venv/bin"
warnings_are="${ATTN_EXT_WERROR:-OFF}"

cmake -S "$root" -B "$build/library" -G Ninja -DCMAKE_PREFIX_PATH="$torch" -DATTN_EXT_WERROR="$warnings_are"
cmake --build "$build/library"
cmake --install "$build/library" --prefix "$build/install"

cmake -S "$root/examples/cpp" -B "$build/examples" -G Ninja -DCMAKE_PREFIX_PATH="$build/install;$torch" \
  -DCMAKE_CXX_FLAGS="-Wall -Wextra $([[ "$warnings_are" =~ ^(0|OFF)$ ]] || echo -Werror)"
cmake --build "$build/examples"

"$build/examples/direct_call"
"$build/examples/packed_call"
"$venv/bin/python" "$root/examples/cpp/save_module.py" "$build/saved"
"$build/examples/scripted_module" "$build/saved"
"$venv/bin/python" "$root/examples/cpp/compile_module.py" "$build/compiled"
"$build/examples/compiled_module" "$build/compiled"
if ldd "$build/examples/scripted_module" "$build/examples/compiled_module" | grep -E 'libpython|libtorch_python'; then
  stop "a C++ program depends on Python."
fi

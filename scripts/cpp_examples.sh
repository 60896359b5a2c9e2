#!/usr/bin/env bash
# Installs the C++ library into build/cpp-install, builds examples/cpp against that install and runs them. CMAKE_ARGS
# goes to the library's CMake.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_attn_ext test
build="$root/build"
torch="$("$venv/bin/python" -c 'import torch; print(torch.utils.cmake_prefix_path)')"
PATH="$PATH:$venv/bin"
warnings_are="${ATTN_EXT_WERROR:-OFF}"
read -ra arguments <<<"${CMAKE_ARGS:-}"

cmake -S "$root" -B "$build/cpp-library" -G Ninja -DCMAKE_PREFIX_PATH="$torch" -DATTN_EXT_WERROR="$warnings_are" \
  "${arguments[@]}"
cmake --build "$build/cpp-library"
cmake --install "$build/cpp-library" --prefix "$build/cpp-install"

cmake -S "$root/examples/cpp" -B "$build/cpp-examples" -G Ninja -DCMAKE_PREFIX_PATH="$build/cpp-install;$torch" \
  -DCMAKE_CXX_FLAGS="-Wall -Wextra $([[ "$warnings_are" =~ ^(0|OFF)$ ]] || echo -Werror)"
cmake --build "$build/cpp-examples"

"$build/cpp-examples/direct_call"
"$build/cpp-examples/packed_call"
"$venv/bin/python" "$root/examples/cpp/save_module.py" "$build/cpp-saved"
"$build/cpp-examples/scripted_module" "$build/cpp-saved"
"$venv/bin/python" "$root/examples/cpp/compile_module.py" "$build/cpp-compiled"
"$build/cpp-examples/compiled_module" "$build/cpp-compiled"
if ldd "$build/cpp-examples/scripted_module" "$build/cpp-examples/compiled_module" | grep -E 'libpython|libtorch_python'; then
  stop "a C++ program depends on Python."
fi

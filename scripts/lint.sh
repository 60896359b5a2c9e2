#!/usr/bin/env bash
# Checks format, style, types and the length of functions, and changes nothing.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_attn_ext lint
cd "$root"
bin="$venv/bin"
"$bin/ruff" check .
"$bin/ruff" format --check .
git ls-files -z '*.cpp' '*.h' | xargs -0 "$bin/clang-format" --dry-run -Werror
"$bin/mypy"
"$bin/python" scripts/check_functions.py csrc

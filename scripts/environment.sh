# Sourced by the scripts beside it: leaves an environment in $venv with attn_ext built and installed in it.
#
# Nothing outside the clone is touched. A torch that the machine's Python already has (2.11 or later) is used
# as it is; otherwise the environment gets one of its own.
#
#   PYTHON             the interpreter to start from; default: the first 3.10 or later on PATH
#   ATTN_EXT_VENV      the environment's folder; default: .venv

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${ATTN_EXT_VENV:-$root/.venv}"
unset PYTHONPATH PYTHONHOME
export PIP_DISABLE_PIP_VERSION_CHECK=1

stop() {
  echo "attn_ext: $*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  stop "Python 3.10 or later is needed and none was found${PYTHON:+ in PYTHON=$PYTHON}."
}

# The folder of a usable torch beside an interpreter, or nothing.
folder_of_torch() {
  "$1" - "$root/build_backend" 2>/dev/null <<'PYTHON' || true
import os, sys
sys.path.insert(0, sys.argv[1])
import attn_ext_build as backend
torch = backend.find_torch()
if torch and backend.numbers(torch.version) >= backend.MINIMUM_TORCH:
    print(os.path.dirname(torch.directory))
PYTHON
}

make_environment() {
  local python parent
  python="$(find_python)"
  "$python" -m venv "$venv" || {
    rm -rf "$venv"
    stop "$python cannot make a virtual environment: install its venv module (on Debian and Ubuntu the package python3-venv)."
  }
  parent="$(folder_of_torch "$python")"
  if [[ -n "$parent" ]]; then
    echo "Using the torch in $parent"
    echo "$parent" >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_beside.pth"
  fi
}

# install_attn_ext EXTRA: everything that is missing, then the package, editable: C++ is only built where it changed.
install_attn_ext() {
  [[ -x "$venv/bin/python" ]] || make_environment
  local missing
  missing="$("$venv/bin/python" - "$root/build_backend" <<'PYTHON'
import sys
sys.path.insert(0, sys.argv[1])
import attn_ext_build as backend
print(*backend.get_requires_for_build_editable())
PYTHON
)"
  echo "Installing attn_ext into $venv (the first time its C++ is compiled, which takes some minutes)"
  # shellcheck disable=SC2086  # one word for each requirement
  "$venv/bin/python" -m pip install --quiet $missing
  "$venv/bin/python" -m pip install --quiet --no-build-isolation --editable "$root[$1]"
}

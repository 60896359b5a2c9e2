#!/usr/bin/env bash
# Installs attn_ext into .venv and runs its tests, with CI=true the slow ones too; arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_attn_ext test
[[ "${CI:-}" != true ]] || set -- --slow "$@"
cd "$root"
exec "$venv/bin/python" -m pytest "$@"

#!/usr/bin/env bash
# Installs attn_ext into .venv and runs its tests on all cores; arguments go to pytest. With CI=true the slow tests
# run too, and those that want models of other libraries.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

extras=test
if [[ "${CI:-}" == true ]]; then
  extras=test,models
  set -- --slow "$@"
fi
install_attn_ext "$extras"
cd "$root"
exec "$venv/bin/python" -m pytest --numprocesses auto --dist loadfile "$@"

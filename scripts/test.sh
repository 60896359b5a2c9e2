#!/usr/bin/env bash
# Installs attn_ext into .venv and runs its tests on all cores; arguments go to pytest. With CI=true the slow tests
# run too, and those that want models of other libraries.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

extras=test
if [[ "${CI:-}" == true ]]; then
  extras=test,models
  set -- --slow --durations=30 "$@"
fi
install_attn_ext "$extras"
cd "$root"
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" # processes as many as cores, each with as many threads
exec "$venv/bin/python" -m pytest --numprocesses auto --dist loadfile "$@"

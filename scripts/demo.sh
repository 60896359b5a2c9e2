#!/usr/bin/env bash
# Installs attn_ext into .venv and runs the demo; arguments go to `attn-ext demo`.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_attn_ext demo
[[ " $* " == *" --out"* ]] || set -- --out attention.png "$@"
"$venv/bin/attn-ext" demo "$@"

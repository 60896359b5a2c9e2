#!/usr/bin/env bash
# Builds the source distribution, and unless --sdist is given a wheel from it, into dist (or --outdir FOLDER), and
# checks what an index would refuse. The wheel is for the torch that the environment has.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

outdir="$root/dist"
kinds=()
while (($#)); do
  case "$1" in
    --sdist) kinds=(--sdist) ;;
    --outdir) outdir="$2"; shift ;;
    *) stop "expected --sdist or --outdir FOLDER, got $1" ;;
  esac
  shift
done

[[ -x "$venv/bin/python" ]] || make_environment
"$venv/bin/python" -m pip install --quiet 'build>=1.2' 'twine>=6.1'
torch="$(folder_of_torch "$venv/bin/python")"
[[ -z "$torch" ]] || export ATTN_EXT_TORCH_DIR="${ATTN_EXT_TORCH_DIR:-$torch/torch}" # an isolated build cannot see it
rm -f "$outdir"/attn_ext-*
"$venv/bin/python" -m build "${kinds[@]}" --outdir "$outdir" "$root"
"$venv/bin/python" -m twine check --strict "$outdir"/attn_ext-*

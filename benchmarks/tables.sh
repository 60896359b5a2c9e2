#!/usr/bin/env bash
# Every table of docs/performance.md, as Markdown, JSON and pictures, one part at a time; arguments go to each
# `attn-ext bench`, as in: bash benchmarks/tables.sh tables --threads 4
#
# Says at the end what is not in them and why: peers and pictures whose packages are not installed, instruction
# sets that the machine lacks, parts that failed, and parts that were measured while something else was running.
# Exits with 1 if a part failed.
#
#   PYTHON   the interpreter whose attn_ext is measured; default: python3
set -euo pipefail
folder="${1:?the folder that the tables go to}"
shift
python="${PYTHON:-python3}"
here="$(dirname "${BASH_SOURCE[0]}")"
mkdir -p "$folder"

left_out=()
failed=0
plot=1
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("matplotlib") is None)'; then
  plot=0
  left_out+=("pictures: matplotlib is not installed; to have them: pip install matplotlib")
fi
capabilities=" $("$python" -c 'import attn_ext; print(*attn_ext.available_cpu_capabilities())') "

# The parts: a name, a tab, and the command with its words apart by tabs ------------------------------

parts=()
add() {
  parts+=("$(printf '%s\t' "$@")")
}
bench() {
  local name="$1"
  shift
  local outputs=(--markdown --json "$folder/$name.json")
  ((plot)) && outputs+=(--plot "$folder/$name.png")
  add "$name" -m attn_ext bench "${outputs[@]}" "$@" "${own[@]}"
}
batches() { # of which there are no pictures
  local name="$1"
  shift
  add "$name" -m attn_ext bench --markdown --json "$folder/$name.json" "$@" "${own[@]}"
}

own=("$@")
long=(bert-512 'gpt2*' 'whisper*' 'sd-self*' 't5*' 'value*')
most=("${long[@]}" 'bert-128' 'vit*')
for dtype in float32 bfloat16 float16; do
  bench "forward-$dtype" --dtype "$dtype"
  bench "backward-$dtype" --dtype "$dtype" --mode bwd --cells 'bert*' 'vit*' 'gpt2*' 'llama*' 'whisper*' 'sd*' 'swin*' 't5*' 'value*'
  bench "dropout-$dtype" --dtype "$dtype" --mode dropout --cells "${most[@]}"
  bench "weights-$dtype" --dtype "$dtype" --mode weights --cells "${most[@]}"
  for mask in padding bool bias; do
    bench "mask-$mask-$dtype" --dtype "$dtype" --mask "$mask" --without --cells "${most[@]}"
  done
  bench "decoding-mask-$dtype" --dtype "$dtype" --mask bool --without --cells 'decode*'
  bench "growth-$dtype" --dtype "$dtype" --peers F.sdpa \
    --shape 1,2,2,512,512,64,64 --shape 1,2,2,1024,1024,64,64 --shape 1,2,2,2048,2048,64,64 \
    --shape 1,2,2,4096,4096,64,64 --shape 1,2,2,8192,8192,64,64 --shape 1,2,2,16384,16384,64,64
  if [[ "$capabilities" == *" avx2 "* ]]; then
    bench "avx2-$dtype" --dtype "$dtype" --capability avx2 --peers F.sdpa
  else
    left_out+=("avx2-$dtype: there is no avx2 on this machine, only$capabilities")
  fi
done
for dtype in float32 bfloat16; do
  batches "packed-$dtype" --packed --dtype "$dtype" --mode fwd fwdbwd
  batches "packed-whole-$dtype" --packed --dtype "$dtype" --mode fwd fwdbwd --mask none
  batches "paged-$dtype" --paged --dtype "$dtype"
done
add memory "$here/memory.py"
add modules "$here/modules.py"
add training-step "$here/training_step.py"
add decode-from-memory "$here/decode_from_memory.py"

# The run -------------------------------------------------------------------------------------------

progress() { # done, name
  local total=${#parts[@]} width=30 filled bar
  filled=$(($1 * width / total))
  bar="$(printf "%${filled}s" "" | tr ' ' '#')$(printf "%$((width - filled))s" "" | tr ' ' '-')"
  printf '[%s] %d of %d parts done, %d min; now %s\n' "$bar" "$1" "$total" $((SECONDS / 60)) "$2" >&2
}

stopped=0
trap 'stopped=1' INT # the part that is running keeps what it has
number=0
for part in "${parts[@]}"; do
  IFS=$'\t' read -r -a words <<<"$part"
  name="${words[0]}"
  if ((stopped)); then
    left_out+=("$name: interrupted before it")
    continue
  fi
  progress "$number" "$name"
  echo "## $name" | tee "$folder/$name.md"
  if ! "$python" "${words[@]:1}" | tee -a "$folder/$name.md"; then
    left_out+=("$name: it failed, see above: $python ${words[*]:1}")
    failed=1
  fi
  number=$((number + 1))
done
progress "$number" "nothing"

# What is not in them -------------------------------------------------------------------------------

files=()
for part in "${parts[@]}"; do
  files+=("$folder/${part%%$'\t'*}.md")
done
while read -r line; do
  left_out+=("$line")
done < <(grep -hs '^not installed' "${files[@]}" | sort -u)
for part in "${parts[@]}"; do
  name="${part%%$'\t'*}"
  if grep -qs '^|.*\(stalled\|~\)' "$folder/$name.md"; then
    left_out+=("$name: has cells without a figure (stalled) or with a rough one (~): something else was running")
  fi
done
if ((${#left_out[@]} == 0)); then
  echo "All ${#parts[@]} tables are in $folder, with nothing left out."
else
  printf 'The tables are in %s. Left out:\n' "$folder"
  printf '  %s\n' "${left_out[@]}"
fi
exit $failed

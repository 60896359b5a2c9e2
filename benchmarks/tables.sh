#!/usr/bin/env bash
# Every table of docs/performance.md, as Markdown, JSON and pictures, one part at a time; arguments go to each
# `attn-ext bench`, as in: bash benchmarks/tables.sh tables --threads 4
#
#   PYTHON   the interpreter whose attn_ext is measured; default: python3
set -euo pipefail
folder="${1:?the folder that the tables go to}"
shift
python="${PYTHON:-python3}"
mkdir -p "$folder"

part() {
  local name="$1"
  shift
  echo "## $name" | tee "$folder/$name.md"
  "$python" -m attn_ext bench --markdown --json "$folder/$name.json" --plot "$folder/$name.png" "$@" |
    tee -a "$folder/$name.md"
}

long=(bert-512 'gpt2*' 'whisper*' 'sd-self*' 't5*' 'value*')
for dtype in float32 bfloat16 float16; do
  part "forward-$dtype" --dtype "$dtype" "$@"
  part "backward-$dtype" --dtype "$dtype" --mode bwd --cells 'bert*' 'vit*' 'gpt2*' 'llama*' 'whisper*' 'sd*' 'swin*' 't5*' 'value*' "$@"
  part "dropout-$dtype" --dtype "$dtype" --mode dropout --cells "${long[@]}" 'bert-128' 'vit*' "$@"
  part "weights-$dtype" --dtype "$dtype" --mode weights --cells "${long[@]}" 'bert-128' 'vit*' "$@"
  for mask in padding bool bias; do
    part "mask-$mask-$dtype" --dtype "$dtype" --mask "$mask" --without --cells "${long[@]}" 'bert-128' 'vit*' "$@"
  done
  part "growth-$dtype" --dtype "$dtype" --peers F.sdpa \
    --shape 1,2,2,512,512,64,64 --shape 1,2,2,1024,1024,64,64 --shape 1,2,2,2048,2048,64,64 \
    --shape 1,2,2,4096,4096,64,64 --shape 1,2,2,8192,8192,64,64 --shape 1,2,2,16384,16384,64,64 "$@"
  part "avx2-$dtype" --dtype "$dtype" --capability avx2 --peers F.sdpa "$@"
done
"$python" "$(dirname "${BASH_SOURCE[0]}")/training_step.py" | tee "$folder/training_step.md"

# gpt-oss-20b on 2 nodes of 8 H100 80 GB.
# Trainer: 8 GPUs, TP2 x EP8, data parallel 4. 32 experts over 8 GPUs. Engines: 4 servers of TP2.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H100[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}" "${PLAIN_COPY[@]}"
  --cluster.trainer-ranks 8
  --megatron.tensor-model-parallel-size 2
  --megatron.expert-model-parallel-size 8
  --sglang.num-engines 4
  --sglang.tp-size 2
  --sglang.mem-fraction-static 0.8
)

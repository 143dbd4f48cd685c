# Qwen3-30B-A3B on 3 nodes of 8 H100 80 GB.
# Trainer: 16 GPUs, TP2 x EP8, data parallel 8. 128 experts over 8 GPUs, two replicas of each.
# Engines: 4 servers of TP2 on the third node.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H100[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}"
  --cluster.trainer-ranks 16
  --megatron.tensor-model-parallel-size 2
  --megatron.expert-model-parallel-size 8
  --sglang.num-engines 4
  --sglang.tp-size 2
  --sglang.mem-fraction-static 0.8
)

# Qwen3.5-35B-A3B on 3 nodes of 8 H100 80 GB.
# Trainer: 16 GPUs, TP2 x PP2 x EP8, data parallel 4. 40 layers in stages of 20; 256 experts over 8 GPUs.
# Engines: 2 servers of TP4 on the third node.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H100[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}"
  --cluster.trainer-ranks 16
  --megatron.tensor-model-parallel-size 2
  --megatron.pipeline-model-parallel-size 2
  --megatron.expert-model-parallel-size 8
  --sglang.num-engines 2
  --sglang.tp-size 4
  --sglang.mem-fraction-static 0.8
)

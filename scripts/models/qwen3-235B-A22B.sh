# Qwen3-235B-A22B on 12 nodes of 8 H200 141 GB.
# Trainer: 64 GPUs, TP4 x PP4 x EP16, data parallel 4. 94 layers in stages of 24, 24, 24 and 22; 128 experts over 16 GPUs.
# Engines: 4 servers of TP8 on four nodes.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H200[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}"
  --cluster.trainer-ranks 64
  --megatron.tensor-model-parallel-size 4
  --megatron.pipeline-model-parallel-size 4
  --megatron.num-layers-in-last-pipeline-stage 22
  --megatron.expert-model-parallel-size 16
  --sglang.num-engines 4
  --sglang.tp-size 8
  --sglang.mem-fraction-static 0.8
)

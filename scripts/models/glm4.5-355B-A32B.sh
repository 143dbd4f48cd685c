# GLM-4.5 (355B-A32B) on 12 nodes of 8 H200 141 GB.
# Trainer: 64 GPUs, TP8 x PP4 x EP16, data parallel 2. 92 layers in stages of 23; 160 experts over 16 GPUs.
# Engines: 4 servers of TP8 on four nodes.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H200[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}"
  --cluster.trainer-ranks 64
  --megatron.tensor-model-parallel-size 8
  --megatron.pipeline-model-parallel-size 4
  --megatron.expert-model-parallel-size 16
  --sglang.num-engines 4
  --sglang.tp-size 8
  --sglang.mem-fraction-static 0.85
)

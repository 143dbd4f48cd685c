# GLM-4.5-Air (106B-A12B) on 6 nodes of 8 H200 141 GB.
# Trainer: 32 GPUs, TP4 x PP2 x EP16, data parallel 4. 46 layers in stages of 23; 128 experts over 16 GPUs.
# Engines: 4 servers of TP4 on two nodes.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H200[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}"
  --cluster.trainer-ranks 32
  --megatron.tensor-model-parallel-size 4
  --megatron.pipeline-model-parallel-size 2
  --megatron.expert-model-parallel-size 16
  --sglang.num-engines 4
  --sglang.tp-size 4
  --sglang.mem-fraction-static 0.8
)

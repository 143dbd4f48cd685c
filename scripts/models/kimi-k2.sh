# Kimi-K2 on 48 nodes of 8 H200 141 GB.
# Trainer: 256 GPUs, TP8 x PP8 x EP32, data parallel 4. 61 layers in stages of 8 and a last one of 5; 384 experts over 32 GPUs.
# Engines: 4 servers of TP32 over four nodes each; bfloat16 weights do not fit fewer.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H200[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}" "${PLAIN_COPY[@]}"
  --cluster.trainer-ranks 256
  --megatron.tensor-model-parallel-size 8
  --megatron.pipeline-model-parallel-size 8
  --megatron.num-layers-in-last-pipeline-stage 5
  --megatron.expert-model-parallel-size 32
  --sglang.num-engines 4
  --sglang.tp-size 32
  --sglang.nnodes 4
  --sglang.ep-size 32
  --sglang.mem-fraction-static 0.85
)

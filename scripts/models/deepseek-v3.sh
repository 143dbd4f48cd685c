# DeepSeek-V3 on 24 nodes of 8 H200 141 GB.
# Trainer: 128 GPUs, TP8 x PP4 x EP32, data parallel 4. 61 layers in stages of 16, 16, 16 and 13; 256 experts over 32 GPUs.
# Engines: 4 servers of TP16 over two nodes each; bfloat16 weights do not fit one.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H200[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}" "${PLAIN_COPY[@]}"
  --cluster.trainer-ranks 128
  --megatron.tensor-model-parallel-size 8
  --megatron.pipeline-model-parallel-size 4
  --megatron.num-layers-in-last-pipeline-stage 13
  --megatron.expert-model-parallel-size 32
  --sglang.num-engines 4
  --sglang.tp-size 16
  --sglang.nnodes 2
  --sglang.ep-size 16
  --sglang.mem-fraction-static 0.85
)

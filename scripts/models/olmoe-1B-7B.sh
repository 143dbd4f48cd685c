# OLMoE-1B-7B on one node of 8 H100 80 GB.
# Trainer: 4 GPUs, EP4, data parallel 4. 64 experts over 4 GPUs. Engines: 4 servers of one GPU.
# The model's context is 4,096 tokens.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H100[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}"
  --cluster.trainer-ranks 4
  --megatron.expert-model-parallel-size 4
  --sglang.num-engines 4
  --sglang.tp-size 1
  --sglang.mem-fraction-static 0.8
  --train.max-tokens-per-micro-batch 8192
  --data.max-prompt-tokens 512
  --rollout.max-response-tokens 3072
)

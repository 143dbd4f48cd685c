# Llama-3.1-8B on one node of 8 H100 80 GB.
# Trainer: 4 GPUs, TP2, data parallel 2. Engines: 4 servers of one GPU.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H100[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${DENSE[@]}"
  --cluster.trainer-ranks 4
  --megatron.tensor-model-parallel-size 2
  --sglang.num-engines 4
  --sglang.tp-size 1
  --sglang.mem-fraction-static 0.8
)

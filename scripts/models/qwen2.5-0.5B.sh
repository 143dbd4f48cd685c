# Qwen2.5-0.5B on two GPUs of one machine (H100 80 GB; any with 40 GB will do).
# Trainer: 1 GPU. Engines: 1 server on the other. Activations fit without recomputation.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${TRAINER[@]}" "${DENSE[@]}"
  --cluster.device cuda
  --cluster.gpus-per-node 2
  --cluster.gpu-memory-gb 80
  --cluster.trainer-ranks 1
  --sglang.num-engines 1
  --sglang.tp-size 1
  --sglang.mem-fraction-static 0.8
  --rollout.max-response-tokens 2048
)

# Qwen3-30B-A3B on one node of 8 H100 80 GB. Engines are on the trainer's GPUs.
# Trainer: TP4 x EP8, data parallel 2. 128 experts over 8 GPUs. With one replica of the experts their optimizer state is not
# sharded, so Adam's moments have 16 bits. Engines: 2 servers of TP4.
# Host memory: 240 GiB, for the trainer's state while engines generate. With less: --cluster.offload-to disk.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H100[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}"
  --cluster.host-memory-gb 1024
  --cluster.placement colocated
  --cluster.trainer-ranks 8
  --megatron.tensor-model-parallel-size 4
  --megatron.expert-model-parallel-size 8
  --megatron.use-precision-aware-optimizer
  --megatron.exp-avg-dtype bfloat16
  --megatron.exp-avg-sq-dtype bfloat16
  --sglang.num-engines 2
  --sglang.tp-size 4
  --weights.transport shm
)

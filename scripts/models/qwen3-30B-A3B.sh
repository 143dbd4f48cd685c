# Qwen3-30B-A3B on one node of 8 GPUs (H100 80 GB or H200 141 GB): parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 4 GPUs, TP2 x EP4 (attention over 2 GPUs, 128 experts over 4, data parallel 2).
# Engines: 2 servers of TP2 on the other 4 GPUs.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.trainer-ranks 4
  --megatron.tensor-model-parallel-size 2
  --megatron.expert-model-parallel-size 4
  --megatron.expert-tensor-parallel-size 1
  --megatron.use-distributed-optimizer
  --megatron.overlap-grad-reduce
  --megatron.overlap-param-gather
  --megatron.moe-grouped-gemm
  --megatron.moe-permute-fusion
  --megatron.recompute-granularity full
  --megatron.recompute-method uniform
  --megatron.recompute-num-layers 1
  --sglang.num-engines 2
  --sglang.tp-size 2
  --sglang.mem-fraction-static 0.8
  --train.max-tokens-per-micro-batch 16384
  --weights.bucket-mib 1024
)

# Llama-3.1-8B on one node of 8 H100 80 GB: parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 4 GPUs, TP2 (data parallel 2).
# Engines: 4 servers of one GPU.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 80
  --cluster.trainer-ranks 4
  --megatron.tensor-model-parallel-size 2
  --megatron.use-distributed-optimizer
  --megatron.overlap-grad-reduce
  --megatron.overlap-param-gather
  --megatron.recompute-granularity full
  --megatron.recompute-method uniform
  --megatron.recompute-num-layers 1
  --sglang.num-engines 4
  --sglang.tp-size 1
  --sglang.mem-fraction-static 0.8
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
  --train.replay off
)

# Qwen2.5-0.5B on two GPUs of one machine (H100 80 GB; any with 40 GB will do): parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 1 GPU.
# Engines: 1 server on the other.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 2
  --cluster.gpu-memory-gb 80
  --cluster.trainer-ranks 1
  --megatron.use-distributed-optimizer
  --megatron.overlap-grad-reduce
  --megatron.overlap-param-gather
  --sglang.num-engines 1
  --sglang.tp-size 1
  --sglang.mem-fraction-static 0.8
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
  --train.replay off
)

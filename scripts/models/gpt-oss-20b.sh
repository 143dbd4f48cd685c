# gpt-oss-20b on 2 nodes of 8 H100 80 GB: parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 8 GPUs, TP2 x EP8 (32 experts over 8, data parallel 4).
# Engines: 4 servers of TP2.
#
# The published weights are quantised; engines take bfloat16 from the trainer, so MODEL is a plain copy: `mslime convert bf16`.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 80
  --cluster.trainer-ranks 8
  --megatron.tensor-model-parallel-size 2
  --megatron.expert-model-parallel-size 8
  --megatron.expert-tensor-parallel-size 1
  --megatron.use-distributed-optimizer
  --megatron.overlap-grad-reduce
  --megatron.overlap-param-gather
  --megatron.moe-grouped-gemm
  --megatron.moe-permute-fusion
  --megatron.recompute-granularity full
  --megatron.recompute-method uniform
  --megatron.recompute-num-layers 1
  --sglang.num-engines 4
  --sglang.tp-size 2
  --sglang.dtype bfloat16
  --sglang.mem-fraction-static 0.8
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
)

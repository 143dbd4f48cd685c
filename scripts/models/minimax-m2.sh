# MiniMax-M2 on 12 nodes of 8 H200 141 GB: parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 64 GPUs, TP4 x PP4 x EP16 (62 layers in stages of 16, 16, 16 and 14, 256 experts over 16; data parallel 4).
# Engines: 4 servers of TP8 on four nodes.
#
# The published weights are quantised; engines take bfloat16 from the trainer, so MODEL is a plain copy: `mslime convert bf16`.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 141
  --cluster.trainer-ranks 64
  --megatron.tensor-model-parallel-size 4
  --megatron.pipeline-model-parallel-size 4
  --megatron.num-layers-in-last-pipeline-stage 14
  --megatron.expert-model-parallel-size 16
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
  --sglang.tp-size 8
  --sglang.dtype bfloat16
  --sglang.mem-fraction-static 0.8
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
)

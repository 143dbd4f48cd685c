# GLM-4.7 (355B-A32B) on 12 nodes of 8 H200 141 GB: parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 64 GPUs, TP8 x PP4 x EP16 (92 layers in stages of 23, 160 experts over 16; data parallel 2).
# Engines: 4 servers of TP8 on four nodes.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 141
  --cluster.trainer-ranks 64
  --megatron.tensor-model-parallel-size 8
  --megatron.pipeline-model-parallel-size 4
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
  --sglang.mem-fraction-static 0.85
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
)

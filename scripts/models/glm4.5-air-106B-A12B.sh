# GLM-4.5-Air (106B-A12B) on 6 nodes of 8 H200 141 GB: parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 32 GPUs, TP4 x PP2 x EP16 (46 layers in stages of 23, 128 experts over 16; data parallel 4).
# Engines: 4 servers of TP4 on two nodes.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 141
  --cluster.trainer-ranks 32
  --megatron.tensor-model-parallel-size 4
  --megatron.pipeline-model-parallel-size 2
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
  --sglang.tp-size 4
  --sglang.mem-fraction-static 0.8
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
)

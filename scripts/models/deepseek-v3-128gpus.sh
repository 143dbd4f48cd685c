# DeepSeek-V3 on 16 nodes of 8 H100 80 GB: parallel layout and performance only. Engines are on the trainer's GPUs.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 128 GPUs, TP4 x PP16 x EP8 (61 layers in stages of 4 and a last one of 1, each stage on a node of its own, 256
# experts over its 8 GPUs; data parallel 2). The optimizer is on the host.
# Engines: 4 servers of TP32 over four nodes each, on the same GPUs: bfloat16 weights do not fit fewer.
# Host memory: 1.1 TB of each node. Weights go through files below --output-dir, which all nodes must share.
#
# The published weights are quantised; engines take bfloat16 from the trainer, so MODEL is a plain copy: `mslime convert bf16`.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 80
  --cluster.host-memory-gb 2048
  --cluster.placement colocated
  --cluster.trainer-ranks 128
  --megatron.tensor-model-parallel-size 4
  --megatron.pipeline-model-parallel-size 16
  --megatron.num-layers-in-last-pipeline-stage 1
  --megatron.expert-model-parallel-size 8
  --megatron.expert-tensor-parallel-size 1
  --megatron.use-distributed-optimizer
  --megatron.use-precision-aware-optimizer
  --megatron.optimizer-cpu-offload
  --megatron.optimizer-offload-fraction 1.0
  --megatron.overlap-grad-reduce
  --megatron.overlap-param-gather
  --megatron.moe-grouped-gemm
  --megatron.moe-permute-fusion
  --megatron.recompute-granularity full
  --megatron.recompute-method uniform
  --megatron.recompute-num-layers 1
  --sglang.num-engines 4
  --sglang.tp-size 32
  --sglang.nnodes 4
  --sglang.ep-size 32
  --sglang.dtype bfloat16
  --train.max-tokens-per-micro-batch 9216
  --weights.transport delta
  --weights.bucket-mib 1024
)

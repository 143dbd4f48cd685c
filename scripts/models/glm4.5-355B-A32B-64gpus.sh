# GLM-4.5 (355B-A32B) on 8 nodes of 8 H100 80 GB: parallel layout and performance only. Engines are on the trainer's GPUs.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 64 GPUs, TP2 x PP8 x EP8 (92 layers in stages of 12 and a last one of 8, 160 experts over the 8 GPUs of a node;
# data parallel 4). The optimizer is on the host. Engines: 4 servers of TP16 over two nodes each, on the same GPUs.
# Host memory: 1.2 TB of each node. Weights go through files below --output-dir, which all nodes must share.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 80
  --cluster.host-memory-gb 2048
  --cluster.placement colocated
  --cluster.trainer-ranks 64
  --megatron.tensor-model-parallel-size 2
  --megatron.pipeline-model-parallel-size 8
  --megatron.num-layers-in-last-pipeline-stage 8
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
  --sglang.tp-size 16
  --sglang.nnodes 2
  --sglang.ep-size 16
  --train.max-tokens-per-micro-batch 9216
  --weights.transport delta
  --weights.bucket-mib 1024
)

# Mixtral-8x7B on 3 nodes of 8 H100 80 GB: parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 16 GPUs, TP2 x PP2 x EP8 (32 layers in stages of 16, one expert of each on a GPU; data parallel 4).
# Engines: 2 servers of TP4 on the third node.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 80
  --cluster.trainer-ranks 16
  --megatron.tensor-model-parallel-size 2
  --megatron.pipeline-model-parallel-size 2
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
  --sglang.num-engines 2
  --sglang.tp-size 4
  --sglang.mem-fraction-static 0.8
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
)

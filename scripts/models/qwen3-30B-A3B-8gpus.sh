# Qwen3-30B-A3B on one node of 8 H100 80 GB: parallel layout and performance only. Engines are on the trainer's GPUs.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 8 GPUs, TP4 x EP8 (128 experts over 8; data parallel 2). With one replica of the experts nothing shares their
# optimizer state, so Adam's moments have 16 bits. Engines: 2 servers of TP4 on the same GPUs.
# Host memory: 240 GiB, for what sleeps while engines generate. With less: --cluster.asleep-in disk.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 80
  --cluster.host-memory-gb 1024
  --cluster.placement colocated
  --cluster.trainer-ranks 8
  --megatron.tensor-model-parallel-size 4
  --megatron.expert-model-parallel-size 8
  --megatron.expert-tensor-parallel-size 1
  --megatron.use-distributed-optimizer
  --megatron.use-precision-aware-optimizer
  --megatron.exp-avg-dtype bfloat16
  --megatron.exp-avg-sq-dtype bfloat16
  --megatron.overlap-grad-reduce
  --megatron.overlap-param-gather
  --megatron.moe-grouped-gemm
  --megatron.moe-permute-fusion
  --megatron.recompute-granularity full
  --megatron.recompute-method uniform
  --megatron.recompute-num-layers 1
  --sglang.num-engines 2
  --sglang.tp-size 4
  --train.max-tokens-per-micro-batch 9216
  --weights.transport shm
  --weights.bucket-mib 1024
)

# Kimi-K2 on 48 nodes of 8 H200 141 GB: parallel layout and performance only.
# The architecture comes from the checkpoint's config.json. Source this file, then pass "${MODEL_ARGS[@]}" to mslime.
#
# Trainer: 256 GPUs, TP8 x PP8 x EP32 (61 layers in stages of 8 and a last one of 5, 384 experts over 32; data parallel 4).
# Engines: 4 servers of TP32 over four nodes each, launched by the run: bfloat16 weights do not fit fewer.
#
# The published weights are quantised; engines take bfloat16 from the trainer, so MODEL is a plain copy: `mslime convert bf16`.
MODEL_ARGS=(
  --cluster.device cuda
  --cluster.gpus-per-node 8
  --cluster.gpu-memory-gb 141
  --cluster.trainer-ranks 256
  --megatron.tensor-model-parallel-size 8
  --megatron.pipeline-model-parallel-size 8
  --megatron.num-layers-in-last-pipeline-stage 5
  --megatron.expert-model-parallel-size 32
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
  --sglang.tp-size 32
  --sglang.nnodes 4
  --sglang.ep-size 32
  --sglang.dtype bfloat16
  --sglang.mem-fraction-static 0.85
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
)

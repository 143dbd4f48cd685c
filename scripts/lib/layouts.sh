# Flags shared by the layouts in scripts/models. To use a layout elsewhere, source its file and pass "${MODEL_ARGS[@]}"
# to mslime. The architecture comes from the checkpoint's config.json.

H100=(--cluster.device cuda --cluster.gpus-per-node 8 --cluster.gpu-memory-gb 80)
H200=(--cluster.device cuda --cluster.gpus-per-node 8 --cluster.gpu-memory-gb 141)

# A micro-batch holds one response of 8,192 tokens with its prompt.
TRAINER=(
  --megatron.use-distributed-optimizer
  --megatron.overlap-grad-reduce
  --megatron.overlap-param-gather
  --train.max-tokens-per-micro-batch 9216
  --weights.bucket-mib 1024
)

# Activations are recomputed in the backward pass, layer by layer.
RECOMPUTE=(
  --megatron.recompute-granularity full
  --megatron.recompute-method uniform
  --megatron.recompute-num-layers 1
)

EXPERTS=(
  --megatron.expert-tensor-parallel-size 1
  --megatron.moe-grouped-gemm
  --megatron.moe-permute-fusion
)

# Without experts there are no routes to replay.
DENSE=(--train.replay off)

# Master weights and Adam's moments in host memory, for trainers that share their GPUs with engines.
HOST_OPTIMIZER=(
  --megatron.use-precision-aware-optimizer
  --megatron.optimizer-cpu-offload
  --megatron.optimizer-offload-fraction 1.0
)

# The published weights are quantised, and engines receive bfloat16: MODEL is a copy from `mslime convert bf16`.
PLAIN_COPY=(--sglang.dtype bfloat16)

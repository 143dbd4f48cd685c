# DeepSeek-V3 on 16 nodes of 8 H100 80 GB. Engines are on the trainer's GPUs.
# Trainer: TP4 x PP16 x EP8, data parallel 2. 61 layers in stages of 4 and a last one of 1; each stage has a node of its own,
# with 256 experts over its 8 GPUs. Engines: 4 servers of TP32 over four nodes each; bfloat16 weights do not fit fewer.
# Host memory: 1.1 TB of each node. Weights go through files below --output-dir, which all nodes must share.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H100[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}" "${HOST_OPTIMIZER[@]}" "${PLAIN_COPY[@]}"
  --cluster.host-memory-gb 2048
  --cluster.placement colocated
  --cluster.trainer-ranks 128
  --megatron.tensor-model-parallel-size 4
  --megatron.pipeline-model-parallel-size 16
  --megatron.num-layers-in-last-pipeline-stage 1
  --megatron.expert-model-parallel-size 8
  --sglang.num-engines 4
  --sglang.tp-size 32
  --sglang.nnodes 4
  --sglang.ep-size 32
  --weights.transport delta
)

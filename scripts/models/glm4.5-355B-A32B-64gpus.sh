# GLM-4.5 (355B-A32B) on 8 nodes of 8 H100 80 GB. Engines are on the trainer's GPUs.
# Trainer: TP2 x PP8 x EP8, data parallel 4. 92 layers in stages of 12 and a last one of 8; 160 experts over the 8 GPUs of a
# node. Engines: 4 servers of TP16 over two nodes each.
# Host memory: 1.2 TB of each node. Weights go through files below --output-dir, which all nodes must share.
source "$(dirname "${BASH_SOURCE[0]}")/../lib/layouts.sh"
MODEL_ARGS=(
  "${H100[@]}" "${TRAINER[@]}" "${RECOMPUTE[@]}" "${EXPERTS[@]}" "${HOST_OPTIMIZER[@]}"
  --cluster.host-memory-gb 2048
  --cluster.placement colocated
  --cluster.trainer-ranks 64
  --megatron.tensor-model-parallel-size 2
  --megatron.pipeline-model-parallel-size 8
  --megatron.num-layers-in-last-pipeline-stage 8
  --megatron.expert-model-parallel-size 8
  --sglang.num-engines 4
  --sglang.tp-size 16
  --sglang.nnodes 2
  --sglang.ep-size 16
  --weights.transport delta
)

# DeepSeek-R1 on 16 nodes of 8 H100 80 GB: the layout of DeepSeek-V3, which has the same architecture.
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3-128gpus.sh"

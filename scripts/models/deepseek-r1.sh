# DeepSeek-R1 on 24 nodes of 8 H200 141 GB: the layout of DeepSeek-V3, which has the same architecture.
source "$(dirname "${BASH_SOURCE[0]}")/deepseek-v3.sh"

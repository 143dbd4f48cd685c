# GLM-4.7 (355B-A32B) on 12 nodes of 8 H200 141 GB: the layout of GLM-4.5, which has the same architecture.
source "$(dirname "${BASH_SOURCE[0]}")/glm4.5-355B-A32B.sh"

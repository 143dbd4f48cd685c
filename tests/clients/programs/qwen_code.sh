# Qwen Code.
export OPENAI_BASE_URL="$2" OPENAI_API_KEY="$3" OPENAI_MODEL=policy IS_SANDBOX=1
qwen -p "What does a.txt say?" --yolo --auth-type openai

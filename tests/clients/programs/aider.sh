# aider, which edits a file without any tool.
export OPENAI_API_BASE="$2" OPENAI_API_KEY="$3"
git init -q
aider --model openai/policy --yes-always --edit-format diff --no-auto-commits --no-show-model-warnings --no-check-update \
  --analytics-disable --message "change hello to three" a.txt >&2
cat a.txt

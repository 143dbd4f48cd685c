# lm-eval on a task of one row: its text is compared, no token is scored.
export OPENAI_API_KEY="$3" HF_HUB_OFFLINE=1
echo '{"q": "1 + 2?", "a": "three"}' >rows.jsonl
cat >tiny.yaml <<YAML
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: $PWD/rows.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 16}
metric_list: [{metric: exact_match}]
YAML
lm_eval --model local-chat-completions --apply_chat_template --tasks tiny --include_path . --model_args \
  "base_url=$2/chat/completions,model=policy,num_concurrent=1,tokenized_requests=False,tokenizer_backend=None" |
  sed -n 's/.*exact_match.*1.*/three/p'

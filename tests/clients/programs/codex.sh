# OpenAI's Codex, by responses.
export CODEX_HOME="$PWD" MSLIME_KEY="$3"
cat >config.toml <<TOML
model = "policy"
model_provider = "mslime"
[model_providers.mslime]
name = "mslime"
base_url = "$2"
env_key = "MSLIME_KEY"
wire_api = "responses"
TOML
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "What does a.txt say?"

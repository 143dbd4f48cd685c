"""mini-swe-agent with its configuration for calls of tools."""

import sys
from pathlib import Path

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model

_, url, key = sys.argv[1:]
told = yaml.safe_load((Path(minisweagent.__file__).parent / "config/mini.yaml").read_text())
asked = {**told["model"].get("model_kwargs", {}), "api_base": url, "api_key": key}
model = get_model("openai/policy", {**told["model"], "model_kwargs": asked, "cost_tracking": "ignore_errors"})
print(DefaultAgent(model, LocalEnvironment(), **told["agent"]).run("What does a.txt say?"))

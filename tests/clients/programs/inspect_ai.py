"""inspect-ai with its provider for APIs like OpenAI's."""

import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes

_, url, key = sys.argv[1:]
model = get_model("openai-api/mslime/policy", base_url=url, api_key=key)
(log,) = eval(Task([Sample("1 + 2?", target="three")], scorer=includes()), model=model, display="plain")
print(log.samples[0].output.completion)

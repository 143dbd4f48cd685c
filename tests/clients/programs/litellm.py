"""LiteLLM by OpenAI's API, and what it raises where the context is full."""

import sys

import litellm

_, url, key = sys.argv[1:]
given = {"model": "openai/policy", "api_base": url, "api_key": key}
parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
given["tools"] = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": parameters}}]
messages = [{"role": "user", "content": "add 1 and 2"}]
reply = litellm.completion(messages=messages, **given).choices[0].message
messages += [reply.model_dump(), {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "3"}]
answer = litellm.completion(messages=messages, **given).choices[0].message.content
try:
    litellm.completion(messages=[{"role": "user", "content": "too long " * 5000}], **given)
except litellm.ContextWindowExceededError:
    print(answer)

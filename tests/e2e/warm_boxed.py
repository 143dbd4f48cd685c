"""Teach an adapter of a server to answer whatever it is asked with 2 or 3 in a box, one as often as the other.

    python warm_boxed.py URL MODEL STEPS

A process of its own, since the cookbook that renders conversations is beside the tests' environment. The last line is
the path of the state that it saved.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import tinker
from tinker import types
from tinker_cookbook import model_info, renderers
from tinker_cookbook.tokenizer_utils import get_tokenizer

QUESTION = "how many apples are there in a box ? written inside of numbers 1 3) 4 . \\ { } r's boxed answer"
WORDS = QUESTION.split()


def conversation(renderer: Any, rng: random.Random, answer: str) -> tuple[list[int], list[float]]:
    """Tokens of a question and its answer, and 1 for those of the answer."""
    said: list[Any] = []
    for _ in range(rng.choice((0, 1))):
        said += [{"role": "user", "content": text(rng, 20)}, {"role": "assistant", "content": text(rng, 20)}]
    said += [{"role": "user", "content": text(rng, 20)}]
    prompt = renderer.build_generation_prompt(said).to_ints()
    made, weights = renderer.build_supervised_example([*said, {"role": "assistant", "content": answer}])
    tokens = made.to_ints()
    assert tokens[: len(prompt)] == prompt, "what is asked begins what is taught"
    return tokens, [float(w) for w in weights]


def text(rng: random.Random, most: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def main(url: str, model: str, steps: int) -> None:
    tokenizer = get_tokenizer(model)
    renderer = renderers.get_renderer(model_info.get_recommended_renderer_name(model), tokenizer)
    client = tinker.ServiceClient(base_url=url)
    training = client.create_lora_training_client(model, rank=4, seed=1).result()
    rng = random.Random(0)
    passed: Any = None
    for step in range(steps):
        data: list[types.Datum] = []
        for answer in ("\\boxed{2}", "\\boxed{3}") * 4:
            tokens, weights = conversation(renderer, rng, answer)
            inputs: dict[str, Any] = {"target_tokens": tokens[1:], "weights": weights[1:]}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        passed = training.forward_backward(data, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.01 * (1 - step / steps)))
        stepped.result()
        if step % 10 == 9:
            count = sum(sum(d.loss_fn_inputs["weights"].data) for d in data)
            print(step, passed.result().metrics["loss:sum"] / count, flush=True)
    print(training.save_state("warm").result().path)
    client.close("success").result()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))

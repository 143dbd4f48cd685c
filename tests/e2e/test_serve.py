"""`mslime serve` with a real trainer of two ranks and a real SGLang server, used by the real `tinker` SDK.

Losses are compared with transformers and peft, log-probs of the engine with the trainer's, and a loaded state with the
adapter that continued.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.harness import Run, assert_listeners_are_documented, interrupt, start_run
from tests.fixtures.peft_models import factors_of, peft_model

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

pytestmark = pytest.mark.timeout(500)
START_S = 240
ADAM = {"learning_rate": 2e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-4}


def settings(checkpoint: Path, **serve: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(checkpoint)},
        "cluster": {"device": "cpu", "trainer_ranks": 2},
        "megatron": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        "sglang": {"max_total_tokens": 8192, "max_running_requests": 16},
        "lora": {"rank": 4, "together": True},
        "serve": {"max_adapters": 3, "engine_adapters": 2, "silence_s": 11, "model_name": "tiny/model", **serve},
    }


@dataclass
class Server:
    """A server that answers."""

    run: Run
    url: str
    key: str
    values: dict[str, Any]

    def client(self) -> Any:
        return tinker.ServiceClient(base_url=self.url, api_key=self.key)


def started(values: dict[str, Any], directory: Path) -> Server:
    run = start_run(values, directory, command="serve")
    record = run.directory / "serve.json"
    try:
        run.wait_for(record.is_file, START_S)
        time.sleep(0.2)
        assert record.stat().st_mode & 0o077 == 0
        said = json.loads(record.read_text())
        return Server(run, said["url"], said["key"], values)
    except BaseException:
        run.stop()
        raise


@pytest.fixture(scope="module")
def server(tiny_qwen3_moe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = started(settings(tiny_qwen3_moe), tmp_path_factory.mktemp("serve"))
    assert_listeners_are_documented(found.run)
    yield found
    found.run.stop()


def batch(step: int) -> list[Any]:
    """Data with learnable targets: each token follows from the one before."""
    rng = np.random.default_rng(step)
    found = []
    for length in (9, 14, 5):
        start = int(rng.integers(40, 60))
        tokens = [start + i for i in range(length)]
        weights = [0.0, *[1.0] * (length - 1)]
        found.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens),
                loss_fn_inputs={"target_tokens": [t + 1 for t in tokens], "weights": weights},
            )
        )
    return found


def trained(training: Any, steps: range) -> list[float]:
    futures, updates = [], []
    for step in steps:
        futures.append(training.forward_backward(batch(step), "cross_entropy"))
        updates.append(training.optim_step(types.AdamParams(**ADAM)))
    losses = [future.result().metrics["loss:sum"] for future in futures]
    for update in updates:
        update.result()
    return losses


def adapter_at(server: Server, path: str) -> Path:
    model, kind, name = path.removeprefix("tinker://").split("/")
    return server.run.directory / "serve" / model.replace(":", "-") / kind / name


def log_probs_of(model: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()


def test_a_client_trains_samples_saves_and_goes_on(server: Server, tiny_qwen3_moe: Path) -> None:
    from mslime.convert.peft import AdapterFile

    with server.client() as client:
        training = client.create_lora_training_client("tiny/model", rank=3, seed=11).result()
        begin = training.save_weights_for_sampler("begin").result().path
        assert training.get_tokenizer().encode("1") is not None
        losses = trained(training, range(3))
        assert losses[2] < losses[1] < losses[0], losses
        # The same three steps by peft and torch, from the factors that the server wrote.
        file = AdapterFile.open(adapter_at(server, begin))
        reader = file.reader()
        factors = {name: reader(name) for name in file.info}
        config = json.loads((adapter_at(server, begin) / "adapter_config.json").read_text())
        lora = {"rank": 3, "alpha": config["lora_alpha"]}
        model = peft_model(tiny_qwen3_moe, config["target_modules"], lora, factors)
        values = factors_of(model)
        assert file.lora.scale == pytest.approx(32 / 3)
        optimizer = torch.optim.AdamW(
            values.values(), lr=ADAM["learning_rate"], betas=(0.9, 0.95), eps=1e-4, weight_decay=0
        )
        for step, loss in enumerate(losses):
            optimizer.zero_grad()
            total = torch.zeros(())
            for datum in batch(step):
                tokens = torch.tensor([datum.model_input.to_ints()])
                target = torch.from_numpy(datum.loss_fn_inputs["target_tokens"].to_numpy())
                weights = torch.from_numpy(datum.loss_fn_inputs["weights"].to_numpy())
                found = model(tokens).logits[0].log_softmax(-1).gather(1, target[:, None])[:, 0]
                total = total - (found * weights).sum()
            assert float(total) == pytest.approx(loss, abs=5e-4 * (step + 1)), step
            total.backward()
            optimizer.step()
        # What an engine samples has the trainer's log-probs, and those of peft.
        sampling = training.save_weights_and_get_sampling_client()
        prompt = [45, 46, 47]
        sampled = sampling.sample(
            types.ModelInput.from_ints(prompt), 2, types.SamplingParams(max_tokens=8, temperature=1.0),
            include_prompt_logprobs=True,
        ).result()  # fmt: skip
        for sequence in sampled.sequences:
            whole = [*prompt, *sequence.tokens]
            datum = types.Datum(
                model_input=types.ModelInput.from_ints(whole[:-1]),
                loss_fn_inputs={"target_tokens": whole[1:], "weights": [0.0] * (len(whole) - 1)},
            )
            (said,) = training.forward([datum], "cross_entropy").result().loss_fn_outputs
            by_trainer = np.asarray(said["logprobs"].tolist())
            assert np.abs(by_trainer[len(prompt) - 1 :] - sequence.logprobs).max() < 1e-4
            assert np.abs(by_trainer[: len(prompt) - 1] - sampled.prompt_logprobs[1:]).max() < 1e-4
            assert np.abs(by_trainer - log_probs_of(model, whole)).max() < 5e-3
        base = client.create_sampling_client(base_model="tiny/model").result()
        of_base = base.compute_logprobs(types.ModelInput.from_ints(prompt)).result()
        assert np.abs(np.asarray(of_base[1:]) - sampled.prompt_logprobs[1:]).max() > 1e-2
        # A state that is loaded goes on as the adapter itself does, to the bit.
        state = training.save_state("after-3").result().path
        went_on = trained(training, range(3, 5))
        again = client.create_training_client_from_state_with_optimizer(state).result()
        assert trained(again, range(3, 5)) == went_on
        fresh = client.create_training_client_from_state(state).result()
        other = trained(fresh, range(3, 5))
        assert other[0] == went_on[0] and other[1] != went_on[1], "the optimizer began anew"


def test_policy_losses_are_those_of_their_formulas(server: Server) -> None:
    with server.client() as client:
        training = client.create_lora_training_client("tiny/model", rank=4, train_mlp=False, seed=1).result()
        tokens, rng = list(range(50, 62)), np.random.default_rng(0)
        advantages = rng.normal(size=11).astype(np.float32)
        inputs = {"target_tokens": tokens[1:], "weights": [0.0] * 11}
        plain = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        said = training.forward([plain], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
        now = np.asarray(said, np.float64)
        then = (now + rng.normal(size=11) * 0.3).astype(np.float32)
        ratio = np.exp(now - then)
        clipped = ratio.clip(0.8, 1.2)
        for name, expected in {
            "importance_sampling": -(ratio * advantages).sum(),
            "ppo": -np.minimum(ratio * advantages, clipped * advantages).sum(),
            "cispo": -(clipped * advantages * now).sum(),
            "dro": -(advantages * now - 0.025 * (now - then) ** 2).sum(),
        }.items():
            inputs = {"target_tokens": tokens[1:], "logprobs": then.tolist(), "advantages": advantages.tolist()}
            datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
            found = training.forward_backward([datum], name).result()
            assert found.metrics["loss:sum"] == pytest.approx(expected, abs=1e-4), name
        assert training.optim_step(types.AdamParams()).result().metrics["grad_norm:mean"] > 0


def test_mistakes_are_answered_in_words_by_the_real_parts(server: Server) -> None:
    with pytest.raises(tinker.AuthenticationError, match="not the key"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong").create_lora_training_client("tiny/model")
    with server.client() as client:
        training = client.create_lora_training_client("tiny/model", rank=4).result()
        long = types.Datum(
            model_input=types.ModelInput.from_ints([1] * 5000),
            loss_fn_inputs={"target_tokens": [1] * 5000, "weights": [1.0] * 5000},
        )
        with pytest.raises(tinker.RequestFailedError, match="5000 tokens"):
            training.forward_backward([long], "cross_entropy").result()
        with pytest.raises(tinker.RequestFailedError, match="stable_reinforce.*not supported"):
            training.forward_backward(batch(0), "stable_reinforce").result()
        # Finite inputs whose loss is not: every rank finds it, and all go on.
        training.forward_backward(batch(0), "cross_entropy")
        with pytest.raises(tinker.RequestFailedError, match="loss"):
            training.forward_backward([infinite()], "importance_sampling").result()
        with pytest.raises(tinker.RequestFailedError, match="no gradients"):
            training.optim_step(types.AdamParams()).result()
        assert len(trained(training, range(1))) == 1


def test_clients_whose_passes_wait_share_one_and_fail_alone(server: Server) -> None:
    """Each has the numbers that it has alone, to the bit."""
    with server.client() as client:
        first, *others = (client.create_lora_training_client("tiny/model", rank=4, seed=3).result() for _ in range(3))
        alone = trained(first, range(6))
        losses: list[list[Any]] = [[], []]
        for step in range(6):
            first.forward_backward(batch(step), "cross_entropy")  # the others wait for it
            for own, training in zip(losses, others, strict=True):
                own.append(training.forward_backward(batch(step), "cross_entropy"))
            if step == 3:  # together with a good pass of the other
                failed = others[1].forward_backward([infinite()], "importance_sampling")
                with pytest.raises(tinker.RequestFailedError, match="loss"):
                    failed.result()
                others[1].forward_backward(batch(step), "cross_entropy")  # its gradients were dropped
            for training in (first, *others):
                training.optim_step(types.AdamParams(**ADAM))
        assert [[each.result().metrics["loss:sum"] for each in own] for own in losses] == [alone, alone]
    log = server.run.directory / "logs" / "trainer_rank0.log"
    assert "one pass of" in log.read_text()


def infinite() -> Any:
    """Finite inputs with an infinite loss."""
    inputs = {"target_tokens": [51, 52], "logprobs": [-50.0, -50.0], "advantages": [3e38, 3e38]}
    return types.Datum(model_input=types.ModelInput.from_ints([50, 51]), loss_fn_inputs=inputs)


def test_a_client_that_disappears_frees_its_adapter(server: Server) -> None:
    """It is a process that is killed: no farewell, no heartbeat. Two others have the last places meanwhile."""
    code = (
        "import tinker, time\n"
        f"client = tinker.ServiceClient(base_url={server.url!r}, api_key={server.key!r})\n"
        "for _ in range(3): client.create_lora_training_client('tiny/model', rank=2).result()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    import subprocess
    import sys

    gone = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert gone.stdout is not None and gone.stdout.readline().strip() == "ready"
        with server.client() as client:
            with pytest.raises(tinker.APIStatusError, match="serve.max_adapters"):
                client.create_lora_training_client("tiny/model", rank=2).result()
            gone.kill()
            gone.wait()
            end = time.monotonic() + 60
            while True:
                try:
                    training = client.create_lora_training_client("tiny/model", rank=2).result()
                    break
                except tinker.APIStatusError:
                    assert time.monotonic() < end, "its adapters were not freed"
                    time.sleep(0.5)
            assert len(trained(training, range(1))) == 1
        assert "3 adapter(s) freed" in server.run.text()
    finally:
        gone.kill()


@pytest.mark.nightly
def test_more_adapters_than_an_engine_holds_are_sampled_in_turns(server: Server) -> None:
    with server.client() as client:
        training = client.create_lora_training_client("tiny/model", rank=4, seed=5).result()
        paths, prompt = [], types.ModelInput.from_ints([45, 46, 47, 48])
        for step in range(4):
            trained(training, range(step, step + 1))
            paths.append(training.save_weights_for_sampler(f"s{step}").result().path)
        samplers = [client.create_sampling_client(model_path=path).result() for path in paths]
        futures = [sampler.compute_logprobs(prompt) for sampler in samplers for _ in range(2)]
        found = np.array([future.result()[1:] for future in futures])
        # Equal adapters differ in the last bit where the engine computed them in batches of different sizes.
        apart = np.abs(found[:, None] - found[None]).max(axis=-1)
        same = np.repeat(np.arange(4), 2)[:, None] == np.repeat(np.arange(4), 2)
        assert apart[same].max() < 1e-5 and apart[~same].min() > 1e-3, apart


def test_a_server_that_ends_leaves_nothing(server: Server) -> None:
    """The last test of the server: it ends it."""
    interrupt(server.run)
    assert server.run.finish(60) == 130, server.run.text()
    assert server.run.left_over() == []
    assert not (server.run.directory / "serve.json").exists()


@pytest.mark.nightly
def test_a_server_that_is_started_again_serves_what_was_saved(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    first = started(settings(tiny_qwen3_moe), tmp_path)
    try:
        with first.client() as client:
            training = client.create_lora_training_client("tiny/model", rank=4, seed=9).result()
            trained(training, range(2))
            state = training.save_state("kept").result().path
            expected = trained(training, range(2, 3))
        interrupt(first.run)
        assert first.run.finish(60) == 130, first.run.text()
    finally:
        first.run.stop()
    again = started(first.values, tmp_path)
    try:
        with again.client() as client:
            loaded = client.create_training_client_from_state_with_optimizer(state).result()
            assert trained(loaded, range(2, 3)) == expected
    finally:
        again.run.stop()


@pytest.mark.nightly
def test_requests_wait_for_an_engine_that_is_started_again(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    import psutil

    values = settings(tiny_qwen3_moe)
    values["sglang"]["restarts"] = 1
    own = started(values, tmp_path)
    try:
        with own.client() as client:
            training = client.create_lora_training_client("tiny/model", rank=4).result()
            trained(training, range(1))
            sampling = training.save_weights_and_get_sampling_client()
            prompt = types.ModelInput.from_ints([45, 46, 47])
            before = sampling.compute_logprobs(prompt).result()
            servers = [
                p for p in psutil.Process(own.run.process.pid).children(recursive=True)
                if "sglang" in " ".join(p.cmdline()) and "launch" in " ".join(p.cmdline())
            ]  # fmt: skip
            assert servers
            for process in servers:
                process.kill()
            assert sampling.compute_logprobs(prompt).result() == before
            assert "it is being restarted" in own.run.text() and "is back at" in own.run.text()
    finally:
        own.run.stop()


@pytest.mark.nightly
def test_a_trainer_rank_that_dies_is_told_to_the_client_and_ends_the_server(
    tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    """A client is in the middle of its steps. The request in progress fails with the dead process and its log file; the
    server reports the same, exits with an error status and leaves no process."""
    own = started(settings(tiny_qwen3_moe), tmp_path)
    client = own.client()
    try:
        training = client.create_lora_training_client("tiny/model", rank=4).result()
        trained(training, range(1))
        ranks = [p for p in own.run.look() if p.name().startswith("ray::AdapterActor")]
        assert len(ranks) == 2, [p.name() for p in own.run.look()]
        ranks[-1].kill()
        with pytest.raises(tinker.TinkerError) as told:
            trained(training, range(1, 4))
        words = str(told.value)
        assert "trainer rank" in words and "the process died" in words and "logs" in words, words
        assert own.run.finish(60) == 2, own.run.text()
        assert "error: " in own.run.text() and "the process died" in own.run.text()
        assert own.run.left_over() == [] and not (own.run.directory / "serve.json").exists()
    finally:
        own.run.stop()

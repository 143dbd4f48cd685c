"""The wire of `mslime serve`: the real `tinker` SDK against a server whose trainer and engines are fakes."""

from __future__ import annotations

import asyncio
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402
from tinker.types.future_retrieve_request import FutureRetrieveRequest  # noqa: E402

from mslime.config.serve import AdamParams, LossChoice  # noqa: E402
from mslime_plugins.serve import bodies  # noqa: E402
from tests.fixtures.fake_serve import BASE, KEY, FakeServer, fake_server  # noqa: E402


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_server(tmp_path, max_adapters=2) as served:
        yield served


@pytest.fixture
def client(server: FakeServer) -> Iterator[Any]:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        yield service


def datum(tokens: list[int], targets: list[int] | None = None, **columns: list[float]) -> Any:
    inputs = {"target_tokens": targets or [t + 1 for t in tokens], **columns}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def weighted(tokens: list[int]) -> Any:
    return datum(tokens, weights=[0.0] + [1.0] * (len(tokens) - 1))


def wait_for(what: Any) -> None:
    while not what():
        time.sleep(0.02)


def test_a_client_trains_saves_and_samples(server: FakeServer, client: Any) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=4, seed=7, train_mlp=False).result()
    config = server.trainer.configs[training.model_id]
    assert (config.lora.rank, config.lora.targets, config.seed) == (4, ("attention",), 7)
    info = training.get_info()
    assert info.model_data.tokenizer_id == "tiny/tokenizer" and info.lora_rank == 4 and info.model_name == BASE
    for step in range(3):  # sent before anything is waited for
        passed = training.forward_backward([weighted([1, 2, 3]), weighted([5, 6])], "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=0.25, beta1=0.8, eps=1e-8, grad_clip_norm=2.0))
        found = passed.result()
        level = -0.25 * step
        assert [out["logprobs"].tolist() for out in found.loss_fn_outputs] == [[-1 - level] * 3, [-1 - level] * 2]
        assert found.metrics["loss:sum"] == pytest.approx(3 * (1 + level))
        assert stepped.result().metrics == {"grad_norm:mean": 2.0, "lr:mean": 0.25}
    assert server.trainer.steps[0] == AdamParams(0.25, 0.8, 0.95, 1e-8, 0.0, 2.0)
    loss, data, backward = server.trainer.losses[0]
    assert loss.name == "cross_entropy" and backward
    assert data[0].tokens.tolist() == [1, 2, 3] and data[0].targets.tolist() == [2, 3, 4]
    assert data[0].weights.tolist() == [0, 1, 1] and data[0].weights.dtype == np.float32
    sampling = training.save_weights_and_get_sampling_client()
    sampled = sampling.sample(
        types.ModelInput.from_ints([9, 10]), 2, types.SamplingParams(max_tokens=6, temperature=0.5, stop=["x"], seed=3),
        include_prompt_logprobs=True,
    ).result()  # fmt: skip
    assert [s.tokens for s in sampled.sequences] == [[11, 12, 13, 14]] * 2
    assert sampled.sequences[0].logprobs == [-0.25] * 4 and sampled.sequences[0].stop_reason == "stop"
    assert len({s.sequence_id for s in sampled.sequences}) == 2
    assert sampled.prompt_logprobs == [None, -2.0]
    asked, other = server.engines.asks[0][1]
    assert (asked.input_ids, asked.max_new_tokens, asked.temperature, asked.masked) == ((9, 10), 6, 0.5, False)
    assert (asked.stop, asked.stop_token_ids, asked.ignore_eos) == (("x",), (), False)
    assert (asked.seed, other.seed, asked.scored_from, other.scored_from) == (3, 4, 1, None)
    assert asked.session_id == other.session_id and asked.rid != other.rid


def test_the_base_is_sampled_by_name_and_scored(server: FakeServer, client: Any) -> None:
    sampling = client.create_sampling_client(base_model="model").result()
    prompt = types.ModelInput.from_ints([3, 4, 5])
    assert sampling.compute_logprobs(prompt).result() == [None, -2.0, -2.0]
    assert sampling.compute_logprobs(prompt, prompt_logprobs_last_n=1).result() == [None, None, -2.0]
    sampling.sample(prompt, 1, types.SamplingParams(stop=[7, 8], top_p=0.9, top_k=5)).result()
    adapter, (asked,) = server.engines.asks[-1]
    assert adapter is None and asked.stop_token_ids == (7, 8) and (asked.top_p, asked.top_k) == (0.9, 5)
    assert asked.max_new_tokens == 29, "without max_tokens all room is taken"
    sampling.sample(prompt, 1, types.SamplingParams(max_tokens=4, stop=[])).result()
    assert server.engines.asks[-1][1][0].ignore_eos
    assert sampling.get_base_model() == "model"


def test_states_are_saved_and_loaded_with_and_without_the_optimizer(server: FakeServer, client: Any) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=4).result()
    training.forward_backward([weighted([1, 2])], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=0.5)).result()
    path = training.save_state("first", ttl_seconds=3600).result().path
    assert path == f"tinker://{training.model_id}/weights/first"
    with pytest.raises(tinker.RequestFailedError, match="saved state of that name"):
        training.save_state("first").result()
    training.save_state("first", overwrite=True).result()
    again = client.create_training_client_from_state_with_optimizer(path).result()
    assert again.model_id != training.model_id and server.trainer.levels[again.model_id] == -0.5
    assert ("load True", again.model_id) in server.trainer.calls and again.get_info().lora_rank == 4
    training.load_state(path).result()
    assert ("load False", training.model_id) in server.trainer.calls
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    about = rest.get_weights_info_by_tinker_path(path).result()
    assert (about.base_model, about.lora_rank, about.train_unembed) == (BASE, 4, False)
    listed = rest.list_checkpoints(training.model_id).result().checkpoints
    assert [c.tinker_path for c in listed] == [path]
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(training.model_id).result().checkpoints == []
    assert [m.model_name for m in rest.get_server_capabilities().result().supported_models] == [BASE, "model"]


def test_what_was_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    with fake_server(tmp_path) as first, tinker.ServiceClient(base_url=first.url, api_key=KEY) as client:
        training = client.create_lora_training_client(base_model=BASE, rank=4).result()
        state, sampler = training.save_state("kept"), training.save_weights_for_sampler("drawn")
        paths = state.result().path, sampler.result().path
    with fake_server(tmp_path) as second, tinker.ServiceClient(base_url=second.url, api_key=KEY) as client:
        client.create_training_client_from_state_with_optimizer(paths[0]).result()
        sampling = client.create_sampling_client(model_path=paths[1]).result()
        sampling.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=2)).result()
        with pytest.raises(tinker.APIStatusError, match="kind weights"):
            client.create_sampling_client(model_path=paths[0]).result()


@pytest.mark.parametrize(
    ("name", "settings", "columns", "choice"),
    [
        ("importance_sampling", None, {}, LossChoice("importance_sampling")),
        ("ppo", {"clip_low_threshold": 0.5}, {}, LossChoice("ppo", 0.5, 1.2)),
        ("cispo", {"clip_high_threshold": 2.0}, {}, LossChoice("cispo", 0.8, 2.0)),
        ("dro", {"beta": 0.5}, {}, LossChoice("dro", beta=0.5)),
    ],
)
def test_losses_come_with_their_settings_and_columns(
    server: FakeServer, client: Any, name: Any, settings: Any, columns: Any, choice: LossChoice
) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=4).result()
    given = datum([1, 2], logprobs=[-1.0, -2.0], advantages=[0.5, -0.5])
    training.forward([given], name, settings).result()
    loss, (got,), backward = server.trainer.losses[-1]
    assert loss == choice and not backward
    assert got.log_probs.tolist() == [-1, -2] and got.advantages.tolist() == [0.5, -0.5]


def test_stable_reinforce_is_the_loss_that_the_server_was_told_to_put_in_its_place(tmp_path: Path) -> None:
    with (
        fake_server(tmp_path, stable_reinforce="ppo") as server,
        tinker.ServiceClient(base_url=server.url, api_key=KEY) as client,
    ):
        training = client.create_lora_training_client(base_model=BASE, rank=4).result()
        sampling = training.save_weights_and_get_sampling_client(record_stability_info=True).result()
        prompt, tokens = [8, 9], [10, 11, 12]
        sampled = sampling.sample(types.ModelInput.from_ints(prompt), 1, types.SamplingParams(max_tokens=3)).result()
        of = {"sequence_id": sampled.sequences[0].sequence_id}
        given = datum(
            [*prompt, *tokens[:-1]], [prompt[1], *tokens], logprobs=[0, -1.0, -1, -1], advantages=[0, 0.5, 0.5, 0.5]
        ).with_provenance(
            model_input=[types.PromptProvenanceSpan(**of, length=2), types.SampledProvenanceSpan(**of, length=2)],
            loss_fn_inputs=[
                types.PromptProvenanceSpan(**of, offset=1, length=1), types.SampledProvenanceSpan(**of, length=3)
            ],
        )  # fmt: skip
        passed = training.forward_backward([given], "stable_reinforce", {"clip_low_threshold": 0.5}).result()
        assert passed.metrics["stable_reinforce_served_as_ppo:mean"] == 1
        assert set(training.forward_backward([given], "ppo").result().metrics) == {"loss:sum"}
        training.forward_backward([given], "stable_reinforce", {"clip_low_threshold": 0.5}).result()
        loss, (got,), backward = server.trainer.losses[-1]
        assert loss == LossChoice("ppo", 0.5, 1.2) and backward and got.advantages.tolist() == [0, 0.5, 0.5, 0.5]
        with pytest.raises(tinker.RequestFailedError, match="kl_coeff.*ppo has no such setting"):
            training.forward_backward([given], "stable_reinforce", {"kl_coeff": 0.01}).result()


def test_a_loss_of_the_clients_own_runs_at_the_client(server: FakeServer, client: Any) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=4).result()

    def squared(data: Any, log_probs: Any) -> Any:
        return sum((column**2).sum() for column in log_probs), {}

    found = training.forward_backward_custom([datum([1, 2])], squared)
    training.optim_step(types.AdamParams()).result()
    assert found.result().metrics["loss:sum"] == 2.0
    assert [backward for _, _, backward in server.trainer.losses] == [False, True]
    assert server.trainer.losses[1][1][0].weights.tolist() == [2.0, 2.0], "minus the gradient"


WRONG: list[tuple[Any, str, dict[str, Any] | None, str]] = [
    (lambda: weighted([1, 2]), "gspo", None, "loss_fn = 'gspo': is not supported; (?s:(?!.*did you mean))"),
    (lambda: weighted([1, 2]), "stable_reinforce", None, "(?s)is not supported.*--serve.stable_reinforce"),
    (lambda: weighted([1] * 32), "cross_entropy", None, "32 tokens.*limit is 31"),
    (lambda: weighted([1, 200]), "cross_entropy", None, "200.*0 to 99"),
    (lambda: datum([1, 2], [3, 100], weights=[1.0, 1.0]), "cross_entropy", None, "target_tokens = 100"),
    (lambda: datum([1, 2]), "cross_entropy", None, "weights.*cross_entropy requires it"),
    (lambda: datum([1, 2], weights=[1.0]), "cross_entropy", None, "1 numbers.*2 tokens"),
    (lambda: datum([1, 2], weights=[1.0, float("nan")]), "cross_entropy", None, r"weights\[1\].*finite"),
    (lambda: weighted([1, 2]), "ppo", None, "weights.*nothing else"),
    (lambda: weighted([1, 2]), "cross_entropy", {"beta": 1.0}, "no such setting"),
    (lambda: datum([1, 2], logprobs=[0.0, 0.0], advantages=[1.0, 1.0]), "ppo",
     {"clip_low_threshold": 3.0}, "must not exceed"),
    (lambda: types.Datum(model_input=types.ModelInput.from_ints([1]), loss_fn_inputs={
        "target_tokens": np.ones((1, 2), np.int64), "weights": np.ones((1, 2), np.float32)}), "cross_entropy", None,
     "several targets"),
]  # fmt: skip


@pytest.mark.parametrize(("made", "loss", "settings", "words"), WRONG)
def test_a_wrong_pass_is_answered_in_words_and_the_next_is_served(
    server: FakeServer, client: Any, made: Any, loss: Any, settings: Any, words: str
) -> None:
    training = client.create_lora_training_client(base_model=BASE, rank=4).result()
    with pytest.raises(tinker.RequestFailedError, match=words) as failed:
        training.forward_backward([made()], loss, settings).result()
    assert failed.value.category == types.RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="no gradients"):
        training.optim_step(types.AdamParams()).result()
    training.forward_backward([weighted([1, 2])], "cross_entropy").result()
    training.optim_step(types.AdamParams()).result()
    assert [what for what, _ in server.trainer.calls] == ["create", "pass", "step"]


def test_other_mistakes_are_answered_in_words(server: FakeServer, client: Any) -> None:
    with pytest.raises(tinker.AuthenticationError, match="not the key"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-other").create_lora_training_client(BASE)
    for make, words in (
        (lambda: client.create_lora_training_client("other/model", 4), "tiny/model or model"),
        (lambda: client.create_lora_training_client(BASE, 17), "ranks up to 16"),
        (lambda: client.create_lora_training_client(BASE, 4, train_mlp=False, train_attn=False), "unembedding"),
        (lambda: client.create_training_client_from_state("tinker://a/weights/b"), "must be tinker://"),
        (lambda: client.create_training_client_from_state(f"tinker://{'0' * 32}:train:0/weights/b"), "no state is"),
        (lambda: client.create_sampling_client(base_model="other"), "tiny/model or model"),
    ):
        with pytest.raises(tinker.APIStatusError, match=words):
            make().result()
    training = client.create_lora_training_client(BASE, 4).result()
    client.create_lora_training_client(BASE, 4).result()
    with pytest.raises(tinker.APIStatusError, match="serve.max_adapters"):
        client.create_lora_training_client(BASE, 4).result()
    drawn = training.save_weights_for_sampler("drawn").result().path
    gone = client.create_sampling_client(model_path=drawn).result()
    tinker.RestClient(base_url=server.url, api_key=KEY).delete_checkpoint_from_tinker_path(drawn).result()
    with pytest.raises(tinker.APIStatusError, match="no state is saved there"):
        gone.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result()
    with pytest.raises(tinker.RequestFailedError, match="must have letters"):
        training.save_state("../../elsewhere").result()
    with pytest.raises(tinker.RequestFailedError, match="adam_params.learning_rate"):
        training.optim_step(types.AdamParams(learning_rate=-1.0)).result()
    sampling = client.create_sampling_client(base_model=BASE).result()
    prompt = types.ModelInput.from_ints([1, 2])
    for wrong, words in (
        ({"prompt": types.ModelInput.from_ints([200])}, "0 to 99"),
        ({"sampling_params": types.SamplingParams(max_tokens=31)}, "limit is 32"),
        ({"topk_prompt_logprobs": 3}, "topk_prompt_logprobs = 3: is not supported"),
        ({"sampling_params": types.SamplingParams(top_p=0.0)}, "top_p"),
        ({"sampling_params": types.SamplingParams(top_k=2**40)}, "top_k"),  # an engine's tensors of it are int32
        ({"sampling_params": types.SamplingParams(max_tokens=1, stop=[2**70])}, "stop"),
    ):
        ask = {"prompt": prompt, "num_samples": 1, "sampling_params": types.SamplingParams(max_tokens=1), **wrong}
        with pytest.raises(tinker.APIStatusError, match=words):
            sampling.sample(**ask).result()


@pytest.mark.parametrize(
    "path",
    [
        "tinker://../weights/x",
        f"tinker://{'0' * 32}:train:0/weights/../../../etc",
        f"tinker://{'0' * 32}:train:0/weights/..",
        f"tinker://{'0' * 32}:train:0/other/x",
        f"tinker://{'0' * 32}:train:0/weights/x\n",
        "/etc/passwd",
    ],
)
def test_paths_that_lead_elsewhere_are_refused(server: FakeServer, path: str) -> None:
    from mslime_plugins.serve.client_errors import ServeError

    with pytest.raises(ServeError, match="must be tinker://"):
        server.service.states.find(path)


def test_a_silent_client_frees_its_adapters_and_samplers(server: FakeServer, client: Any) -> None:
    training = client.create_lora_training_client(BASE, 4).result()
    training.save_weights_and_get_sampling_client()
    kept = training.save_weights_for_sampler("kept").result().path

    async def silent_for(seconds: float) -> None:
        for session in server.service.sessions.all:
            session.seen -= seconds
        await server.service.tidy()

    asyncio.run_coroutine_threadsafe(silent_for(30.0), server.loop).result(10)
    assert list(server.trainer.levels) == [training.model_id]
    asyncio.run_coroutine_threadsafe(silent_for(61.0), server.loop).result(10)
    assert not server.trainer.levels and server.trainer.calls[-1] == ("free", training.model_id)
    assert len(server.engines.forgotten) == 1 and not server.engines.forgotten[0].exists()
    assert server.service.states.find(kept).path == kept
    with pytest.raises(tinker.APIStatusError, match="sent no request"):
        training.forward_backward([weighted([1, 2])], "cross_entropy").result()


def test_what_was_saved_for_a_time_goes_after_it(server: FakeServer, client: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("mslime_plugins.serve.tinker_service.EXPIRED_S", 0.0)
    training = client.create_lora_training_client(BASE, 4).result()
    kept = training.save_state("kept", ttl_seconds=3600).result().path
    going = training.save_weights_for_sampler("going", ttl_seconds=1).result().path
    directory = server.service.states.directory(going)
    wait_for(lambda: not directory.exists())
    wait_for(lambda: server.engines.forgotten == [directory])
    assert server.service.states.find(kept).path == kept


def test_a_client_that_closes_frees_its_adapters_at_once(server: FakeServer) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key=KEY) as service:
        service.create_lora_training_client(BASE, 4).result()
        assert len(server.trainer.levels) == 1
    wait_for(lambda: not server.trainer.levels)


def test_two_clients_train_beside_each_other(server: FakeServer) -> None:
    server.trainer.slow_s = 0.02
    with (
        tinker.ServiceClient(base_url=server.url, api_key=KEY) as one,
        tinker.ServiceClient(base_url=server.url, api_key=KEY) as two,
    ):
        trainings = [each.create_lora_training_client(BASE, 4).result() for each in (one, two)]
        waited = []
        for _ in range(4):
            for training in trainings:
                training.forward_backward([weighted([1, 2])], "cross_entropy")
                waited.append(training.optim_step(types.AdamParams(learning_rate=1.0)))
        for future in waited:
            future.result()
        assert sorted(server.trainer.levels.values()) == [-4.0, -4.0]
        order = [name for what, name in server.trainer.calls if what == "step"]
        assert order[:2] != [order[0]] * 2 or order[2:4] != [order[0]] * 2, "one waits for all of the other's"


def test_parts_of_a_batch_come_in_any_order_and_are_done_in_theirs(server: FakeServer, client: Any) -> None:
    training = client.create_lora_training_client(BASE, 4).result()
    client.holder._client_config = client.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 1})
    found = training.forward_backward([weighted([i, i + 1]) for i in range(5)], "cross_entropy")
    training.optim_step(types.AdamParams()).result()
    assert len(found.result().loss_fn_outputs) == 5
    assert [data[0].tokens[0] for _, data, _ in server.trainer.losses] == [0, 1, 2, 3, 4]
    assert server.trainer.calls[-1][0] == "step"


def test_a_request_that_is_sent_twice_is_done_once(server: FakeServer, client: Any) -> None:
    training = client.create_lora_training_client(BASE, 4).result()
    training.forward_backward([weighted([1, 2])], "cross_entropy").result()
    request = types.OptimStepRequest(optim_params=types.AdamParams(), model_id=training.model_id, seq_id=2)
    holder = client.holder

    async def send() -> Any:
        with holder.aclient(tinker.lib.client_connection_pool_type.ClientConnectionPoolType.TRAIN) as raw:
            first, second = [await raw.training.optim_step(request=request) for _ in range(2)]
            assert first.request_id == second.request_id
            asked = FutureRetrieveRequest(request_id=first.request_id)
            return [await raw.futures.with_raw_response.retrieve(request=asked) for _ in range(2)]

    async def told(response: Any) -> Any:
        return await response.json()

    for response in holder.run_coroutine_threadsafe(send()).result():
        assert "metrics" in holder.run_coroutine_threadsafe(told(response)).result()
    assert len(server.trainer.steps) == 1


def test_a_failed_trainer_is_the_servers_fault_and_its_model_is_not_trained_on(server: FakeServer, client: Any) -> None:
    training = client.create_lora_training_client(BASE, 4).result()
    state = training.save_state("good").result().path
    training.forward_backward([weighted([1, 2])], "cross_entropy").result()
    server.trainer.fail = "step"
    with pytest.raises(tinker.RequestFailedError, match="broke in the test") as failed:
        training.optim_step(types.AdamParams()).result()
    assert failed.value.category == types.RequestErrorCategory.Server
    with pytest.raises(tinker.RequestFailedError, match=r"can no longer be trained: optim_step failed, .*\(mend it\)"):
        training.forward_backward([weighted([1, 2])], "cross_entropy").result()
    training.load_state_with_optimizer(state).result()
    training.forward_backward([weighted([1, 2])], "cross_entropy").result()


def test_a_model_that_could_not_be_made_leaves_its_place(server: FakeServer, client: Any) -> None:
    for _ in range(3):
        server.trainer.fail = "create"
        with pytest.raises(tinker.RequestFailedError, match="broke in the test"):
            client.create_lora_training_client(BASE, 4).result()
    training = client.create_lora_training_client(BASE, 4).result()
    path = training.save_state("a").result().path
    server.trainer.fail = "load True"
    with pytest.raises(tinker.RequestFailedError, match="broke in the test"):
        client.create_training_client_from_state_with_optimizer(path).result()
    assert list(server.trainer.levels) == [training.model_id]


def test_an_engine_that_fails_is_the_servers_fault(server: FakeServer, client: Any) -> None:
    sampling = client.create_sampling_client(base_model=BASE).result()
    server.engines.fail = True
    with pytest.raises(tinker.RequestFailedError, match="died in the test") as failed:
        sampling.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result()
    assert failed.value.category == types.RequestErrorCategory.Server


def test_a_sample_that_nobody_waits_for_is_stopped(
    server: FakeServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures, polled = server.service.futures, threading.Event()
    fetch = futures.fetch

    async def noticed(request_id: str, patience_s: float) -> Any:
        polled.set()
        return await fetch(request_id, patience_s)

    monkeypatch.setattr(futures, "fetch", noticed)
    sampling = client.create_sampling_client(base_model=BASE).result()
    polled.clear()
    server.engines.slow_s = 3600.0
    future = sampling.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1))
    wait_for(lambda: server.engines.asks)
    polled.wait()  # the SDK can name its request to the server now
    future.future().cancel()
    wait_for(lambda: server.engines.cancelled == 1)


@pytest.mark.parametrize("how", ["session ends", "request is cancelled"])
def test_an_adapter_whose_client_goes_while_it_is_created_is_freed(server: FakeServer, how: str) -> None:
    service = server.service

    async def created() -> tuple[str, str]:
        session = service.open_session(bodies.CreateSession())
        body = bodies.CreateModel(
            session_id=session.session_id, model_seq_id=0, base_model=BASE, lora_config=bodies.Lora(rank=4)
        )
        request_id, _ = service.create_model(body)
        await asyncio.sleep(0.1)  # the thread of the creation has started, or will
        return session.session_id, request_id

    async def gone(session_id: str, request_id: str) -> None:
        if how == "session ends":
            await service.end_session(session_id, "in the test")
        else:
            service.futures.cancel(request_id)
            await service.futures.fetch(request_id, 10.0)

    with server.trainer.turn.held():  # the ranks are busy, so the creation waits
        ids = asyncio.run_coroutine_threadsafe(created(), server.loop).result(10)
        asyncio.run_coroutine_threadsafe(gone(*ids), server.loop).result(10)
        assert not service.sessions.models
    wait_for(lambda: [what for what, _ in server.trainer.calls] == ["create", "free"])


def test_too_many_requests_are_told_to_come_again(tmp_path: Path) -> None:
    with fake_server(tmp_path, max_requests=2) as server:
        server.engines.slow_s = 0.3
        with tinker.ServiceClient(base_url=server.url, api_key=KEY) as client:
            sampling = client.create_sampling_client(base_model=BASE).result()
            ask = (types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1))
            for future in [sampling.sample(*ask) for _ in range(5)]:
                future.result()
        assert len(server.engines.asks) == 5


def test_a_long_request_is_polled_for(server: FakeServer, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mslime_plugins.serve.server.POLL_S", 0.05)
    server.trainer.slow_s = 0.4
    training = client.create_lora_training_client(BASE, 4).result()
    assert training.forward([weighted([1, 2])], "cross_entropy").result().metrics["loss:sum"] == 1.0


def test_everything_asks_for_the_key(server: FakeServer) -> None:
    paths = [str(route.resource.canonical) for route in _routes(server) if route.resource is not None]
    assert len(paths) > 20
    for route in _routes(server):
        if route.method == "HEAD" or route.resource is None:
            continue
        url = server.url + route.resource.canonical.replace("{", "").replace("}", "")
        request = urllib.request.Request(url, method=route.method, data=b"{}" if route.method == "POST" else None)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=5)
        assert refused.value.code == 401, url


def test_a_body_beyond_the_largest_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mslime_plugins.serve.server.LARGEST_BODY", 2 << 20)
    with fake_server(tmp_path) as server:
        url, body = f"{server.url}/api/v1/create_session", b" " * ((2 << 20) + 1)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, data=body, headers={"X-API-Key": KEY}), timeout=30)
    assert refused.value.code == 413 and b"is larger than 2097152 bytes" in refused.value.read()


def _routes(server: FakeServer) -> list[Any]:
    from mslime_plugins.serve.server import Server

    async def listed() -> list[Any]:
        return list(Server(server.service, KEY).app().router.routes())

    return asyncio.run_coroutine_threadsafe(listed(), server.loop).result(5)


def test_what_is_not_served_is_said_in_words(server: FakeServer) -> None:
    request = urllib.request.Request(f"{server.url}/api/v1/copy_weights", data=b"{}", headers={"X-API-Key": KEY})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=5)
    assert refused.value.code == 404 and b"is not supported" in refused.value.read()
    assert threading.active_count() > 0

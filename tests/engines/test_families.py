"""Every model family on real megatron-core: transformers' logits, the way back to disk, mbridge's export, SGLang.

Each case and layout needs one run of the ranks for all of its tests. `tests/fixtures/families` defines the cases.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mslime.backends.megatron.model.chunks import named_local_params
from mslime.backends.megatron.step.trainer import MegatronTrainer
from mslime.backends.sglang.client import EngineClient, EngineDied
from mslime.backends.sglang.engine_pool import EnginePool
from mslime.backends.sglang.generating import GenerateRequest, GenerateResult, ProbeRequest
from mslime.backends.sglang.port import SGLangPort
from mslime.checks.resolve import EXACT_TOLERANCE
from mslime.config.base import PauseMode
from mslime.config.keys import Endpoint
from mslime.convert.families import FAMILIES, get_family
from mslime.convert.hf import HFCheckpoint
from mslime.data.probe import NEW_TOKENS, ProbeDifferences, ProbeScores, joined_routes
from mslime.engine_plugin.wire import RECORDED
from tests.engines.conftest import serve
from tests.engines.test_weight_sync import PROMPT, are_those_of, change_weights, engine_log_probs, publish
from tests.engines.trainer_ranks import make_config, make_shard, run_trainers, worst_logit_difference
from tests.fixtures.engine_calls import load, with_pool
from tests.fixtures.families import CASES
from tests.fixtures.families.case import FamilyCase

pytestmark = pytest.mark.timeout(240)

LAYOUTS = [(case.name, index) for case in CASES.values() for index in range(len(case.layouts))]


def cases(chosen: Iterable[tuple[str, int]]) -> list[Any]:
    """Parameters (name, index)."""
    return [
        pytest.param(name, index, id=f"{name} {CASES[name].layouts[index] or 'one process'}") for name, index in chosen
    ]


@dataclass(frozen=True)
class Outcome:
    """Results of the ranks of one layout.

    Attributes:
        rows: logit rows compared with transformers'.
        logits: largest difference in them.
        exported: directory with the export of the untouched weights.
        different_from_mbridge: tensors that differ in a bit after a change to every parameter; None: not compared.
    """

    rows: int
    logits: float
    exported: Path
    different_from_mbridge: list[str] | None


class Ran:
    """Checkpoints, references and outcomes of this session, each created on first use."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._checkpoints: dict[str, Path] = {}
        self._outcomes: dict[tuple[str, int], Outcome] = {}

    def checkpoint(self, case: FamilyCase) -> Path:
        """The tiny model, with transformers' logits of `make_shard`'s sequences beside it in `logits.pt`."""
        if case.name not in self._checkpoints:
            directory = case.make(self._root / re.sub(r"\W+", "-", case.name))
            shard, model = make_shard(), case.transformers_model(directory)
            sequences = torch.from_numpy(shard.tokens).long().split(shard.lengths.tolist())
            with torch.no_grad():
                logits = torch.cat([model(tokens[None]).logits[0] for tokens in sequences])
            torch.save(logits, directory / "logits.pt")
            self._checkpoints[case.name] = directory
        return self._checkpoints[case.name]

    def outcome(self, name: str, index: int) -> Outcome:
        """Of one case in one of its layouts."""
        if (name, index) not in self._outcomes:
            case = CASES[name]
            sizes, checkpoint = case.layouts[index], self.checkpoint(case)
            out = self._root / f"{checkpoint.name}-{index}"
            config = make_config(checkpoint, out, **sizes)
            ask_mbridge = case.asks_mbridge(sizes)
            found = run_trainers(examine, config, checkpoint / "logits.pt", out / "exported", ask_mbridge)
            rows = sum(rank["rows"] for rank in found)
            worst = max(rank["logits"] for rank in found)
            different = [tensor for rank in found for tensor in rank["different"]] if ask_mbridge else None
            self._outcomes[name, index] = Outcome(rows, worst, out / "exported", different)
        return self._outcomes[name, index]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(tmp_path_factory.mktemp("families"))


def examine(trainer: MegatronTrainer, reference: Path, exported: Path, ask_mbridge: bool) -> dict[str, Any]:
    """On every rank: compare logits, export, and compare the export of changed weights with mbridge's."""
    rows, logits = worst_logit_difference(trainer, torch.load(reference))
    trainer.weight_sender().export(exported, trainer.spec.checkpoint)
    different = perturb_and_export(trainer, exported.with_name("changed")) if ask_mbridge else []
    return {"rows": rows, "logits": logits, "different": different}


class TransformerEngineNames:
    """Presents a local-spec model under mbridge's parameter names (test oracle's adapter)."""

    def __init__(self, model: Any) -> None:
        self._model, self.decoder, self.config = model, model.decoder, model.config

    def _name(self, name: str) -> str:
        match = re.match(r"(decoder\.layers\.(\d+)\.)(.*)", name)
        if match is None:
            return name
        prefix, layer, rest = match.groups()
        if self.config.multi_latent_attention:
            rest = re.sub(r"self_attention\.(q|kv)_layernorm\.", r"self_attention.linear_\1_up_proj.layer_norm_", rest)
        elif rest == "input_layernorm.weight":
            return prefix + "self_attention.linear_qkv.layer_norm_weight"
        if rest == "pre_mlp_layernorm.weight" and not hasattr(self.decoder.layers[int(layer)].mlp, "router"):
            return prefix + "mlp.linear_fc1.layer_norm_weight"
        if expert := re.match(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", rest):
            return f"{prefix}mlp.experts.{expert[2]}.weight{expert[1]}"
        return prefix + rest

    def named_parameters(self) -> Any:
        return ((self._name(name), parameter) for name, parameter in self._model.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        return {self._name(name): value for name, value in self._model.state_dict().items()}


def mbridge_export(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Every Hugging Face tensor, as mbridge exports it from this trainer's model."""
    from mbridge import AutoBridge
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge
    from megatron.core.transformer.transformer_config import MLATransformerConfig
    from transformers import AutoConfig

    def latent_config(max_position_embeddings: int, **others: Any) -> MLATransformerConfig:
        """megatron-core 0.16.1's config, with the older field names of mbridge 0.15.1."""
        return MLATransformerConfig(original_max_position_embeddings=max_position_embeddings, **others)

    DeepseekV3Bridge.TransformerConfigClass = staticmethod(latent_config)
    config = AutoConfig.from_pretrained(trainer.spec.checkpoint)
    config.rope_theta = config.rope_parameters["rope_theta"]  # mbridge 0.15.1 reads transformers 4 configurations
    config.rope_scaling = None
    config.head_dim = trainer.transformer.kv_channels  # null in Mixtral's
    bridge = AutoBridge.from_config(config, dtype=torch.float32)
    views = [TransformerEngineNames(chunk) for chunk in trainer.chunks]
    with torch.no_grad():
        return {name: tensor.clone() for name, tensor in bridge.export_weights(views)}


def change_every_parameter(trainer: MegatronTrainer) -> None:
    """Add to every parameter a specific amount, the same on every rank that holds a part of it."""
    rules = get_family(trainer.hf_config).rules(trainer.hf_config)
    with torch.no_grad():
        for name, parameter in named_local_params(trainer.chunks):  # the copy of a tied embedding included
            parameter.add_(0.01 * (1 + zlib.crc32(rules.bind(name).hf_names[0].encode()) % 7))


def perturb_and_export(trainer: MegatronTrainer, directory: Path) -> list[str]:
    """Change every parameter, export with both, and name every tensor in which a bit differs."""
    change_every_parameter(trainer)
    trainer.weight_sender().export(directory, trainer.spec.checkpoint)
    oracle = mbridge_export(trainer)
    ours = HFCheckpoint(directory)
    assert ours.info.keys() == oracle.keys(), ours.info.keys() ^ oracle.keys()
    return [name for name, tensor in oracle.items() if not torch.equal(ours.tensor(name), tensor)]


def assert_same_tensors(found: Path, source: Path) -> None:
    """Both checkpoints hold the same names with the same bits and dtypes."""
    ours, theirs = HFCheckpoint(found), HFCheckpoint(source)
    hf_config = json.loads((source / "config.json").read_text())
    rules = get_family(hf_config).rules(hf_config)
    assert ours.info.keys() == theirs.info.keys() - set(rules.ignored), ours.info.keys() ^ theirs.info.keys()
    for name in ours.info:
        mine, yours = ours.tensor(name), theirs.tensor(name)
        assert mine.dtype == yours.dtype and torch.equal(mine, yours), name


@pytest.mark.parametrize(("name", "index"), cases(LAYOUTS))
def test_megatron_logits_equal_transformers_within_1e_5(ran: Ran, name: str, index: int) -> None:
    outcome = ran.outcome(name, index)
    assert outcome.rows > 0 and outcome.logits <= 1e-5, outcome


@pytest.mark.parametrize(("name", "index"), cases(LAYOUTS))
def test_a_checkpoint_comes_back_bit_for_bit(ran: Ran, name: str, index: int) -> None:
    assert_same_tensors(ran.outcome(name, index).exported, ran.checkpoint(CASES[name]))


@pytest.mark.parametrize(
    ("name", "index"),
    cases((name, index) for name, index in LAYOUTS if CASES[name].asks_mbridge(CASES[name].layouts[index])),
)
def test_the_export_equals_mbridges_bit_for_bit(ran: Ran, name: str, index: int) -> None:
    assert ran.outcome(name, index).different_from_mbridge == []


def in_bfloat16(source: Path, target: Path) -> Path:
    """The checkpoint rounded to bfloat16, except tensors for which the family requires another dtype."""
    from safetensors.torch import save_file

    hf_config = json.loads((source / "config.json").read_text())
    rules, checkpoint = get_family(hf_config).rules(hf_config), HFCheckpoint(source)
    own = {name for rule in rules.all_bound.values() if rule.dtype for name in rule.hf_names}
    target.mkdir()
    tensors = {
        name: checkpoint.tensor(name).to(torch.float32 if name in own else torch.bfloat16) for name in checkpoint.info
    }
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    hf_config["dtype"] = "bfloat16"
    hf_config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(hf_config))
    return target


def export_only(trainer: MegatronTrainer, exported: Path) -> None:
    trainer.weight_sender().export(exported, trainer.spec.checkpoint)


@pytest.mark.parametrize("name", CASES)
def test_a_bfloat16_checkpoint_comes_back_bit_for_bit(ran: Ran, tmp_path: Path, name: str) -> None:
    source = in_bfloat16(ran.checkpoint(CASES[name]), tmp_path / "bf16")
    unpacked = {key: value for key, value in CASES[name].layouts[0].items() if key == "train"}
    config = make_config(source, tmp_path / "out", params_dtype="bfloat16", **unpacked)
    run_trainers(export_only, config, tmp_path / "exported")
    assert_same_tensors(tmp_path / "exported", source)


def send_changed(trainer: MegatronTrainer, engine: Endpoint, exported: Path) -> tuple[set[str], list[Any]]:
    """Send the weights, change every parameter, send them again and write them to disk. The second time the engine
    loads by what it recorded the first time, or by its model's own loader again.

    Returns:
        What it says of that to this rank; and a probe, with what this rank says of it. For a model that derives tensors
        from its weights more: before the end of a third sync, when they are those of the second, and after it; and the
        same of an engine that keeps a request through its pause, in both ways that there are.
    """
    engine_port, rank = SGLangPort(trainer.spec.deadlines), trainer.parallel.rank
    sender = trainer.weight_sender(engine_port)
    sender.connect([engine])
    publish(sender, 1, rank, check=False)
    engine_port.reports.clear()
    change_every_parameter(trainer)
    publish(sender, 2, rank)
    said, probes = {said for _, said in engine_port.reports}, [probe(trainer, engine, 2)]
    if trainer.transformer.multi_latent_attention:
        change_weights(trainer, -0.19)
        publish(sender, 3, rank, end=False)
        probes.append(probe(trainer, engine, 3))
        if rank == 0:
            with_pool(sender.engines, lambda pool: pool.end_update())
        probes.append(probe(trainer, engine, 3))
        for version, mode in enumerate(KEEPS, 4):
            change_weights(trainer, 0.4 * (-1) ** version)
            publish(sender, version, rank, end=False)
            probes += probes_beside_a_request(trainer, engine, version, mode)
    sender.disconnect()
    sender.export(exported, trainer.spec.checkpoint)
    return said, probes


def probe(trainer: MegatronTrainer, engine: Endpoint, version: int) -> tuple[ProbeScores, Any]:
    """The engine's answer under a version, and this rank's results for it."""

    async def ask() -> ProbeScores:
        request = ProbeRequest(f"probe-{version}", PROMPT, version, want_routes=bool(trainer.model.num_experts))
        async with EngineClient(engine.url, "engine", model=trainer.model, keys=engine.keys) as client:
            return await client.probe(request)

    answer = [asyncio.run(ask()) if trainer.parallel.rank == 0 else None]
    dist.broadcast_object_list(answer)
    assert answer[0] is not None
    return answer[0], trainer.probe([answer[0].tokens])


KEEPS: tuple[PauseMode, ...] = ("retract", "in_place")
"""Pauses through which an engine keeps requests."""


def probes_beside_a_request(
    trainer: MegatronTrainer, engine: Endpoint, version: int, mode: PauseMode
) -> list[tuple[ProbeScores, Any]]:
    """Two probes of an engine that keeps a request through its pause: before the end of a sync, after which the request
    is lost, and after it, when it is answered under this version. What this rank says of each."""
    request = ProbeRequest(f"beside-{version}", PROMPT, version, want_routes=bool(trainer.model.num_experts))

    async def ask() -> list[ProbeScores]:
        async with EngineClient(engine.url, "engine", model=trainer.model, keys=engine.keys) as client:
            pool = EnginePool([client], 2)
            lost = await under_way(pool, f"lost-{mode}")
            await pool.pause(mode)
            (stale,) = (await pool.probe(request)).values()
            assert not lost.done()
            await pool.restart_update()
            with pytest.raises(EngineDied, match="weights that failed the probe"):
                await lost
            await pool.resume()
            kept = await under_way(pool, f"kept-{mode}")
            await pool.pause(mode)
            await pool.end_update()
            await pool.stamp(version)
            (sound,) = (await pool.probe(replace(request, rid=f"again-{version}"))).values()
            assert not kept.done()
            await pool.flush_cache()
            await pool.resume()
            result = await kept
            assert len(result.output_ids) == LONG and result.versions[-1][:1] == (version,)
            assert result.retractions == (mode == "retract")
            return [stale, sound]

    answers = asyncio.run(ask()) if trainer.parallel.rank == 0 else [None, None]
    dist.broadcast_object_list(answers)
    return [(each, trainer.probe([each.tokens])) for each in answers if each is not None]


LONG = 150
"""Tokens of a request that is not over when an engine is paused."""


async def under_way(pool: EnginePool, rid: str) -> asyncio.Task[GenerateResult]:
    """A request that an engine is working on."""
    request = GenerateRequest(rid, PROMPT, LONG, ignore_eos=True, cache_key=rid)
    asked = asyncio.create_task(pool.generate(request))
    while not await load(pool.clients[0], "running"):
        await asyncio.sleep(0.01)
    return asked


def differences(probed: Sequence[tuple[ProbeScores, Any]]) -> ProbeDifferences:
    """Differences between an engine's answer and all ranks' results for it."""
    answer, length = probed[0][0], len(PROMPT) + NEW_TOKENS
    routes = joined_routes([part for _, (_, part) in probed if part is not None], length)
    found = [
        ProbeDifferences.between(answer, ProbeScores(answer.tokens, answer.given, lp, routes)) for _, (lp, _) in probed
    ]
    return max(found, key=lambda each: each.log_probs)


SERVED = [name for name, case in CASES.items() if case.served]


@pytest.mark.nightly
@pytest.mark.parametrize("name", SERVED)
def test_the_engine_serves_the_synced_weights_as_transformers_computes_them(
    ran: Ran, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    checkpoint = ran.checkpoint(case)
    server = serve(checkpoint, tmp_path / "log")
    try:
        before, _ = engine_log_probs(server.endpoint)
        sizes = {"tp": 2, "ep": 2} if server.model.top_k else {"tp": 2}
        config = make_config(checkpoint, tmp_path, **sizes)
        # Many small buckets: one that holds a tensor which is more than copied is loaded by the model's own loader.
        small = config.model_copy(update={"weights": config.weights.model_copy(update={"bucket_mib": 0.01})})
        said, probed = zip(*run_trainers(send_changed, small, server.endpoint, tmp_path / "sent"), strict=True)
        after, meta = engine_log_probs(server.endpoint, new_tokens=12)
        assert are_those_of(server.endpoint, tmp_path / "sent")
    finally:
        server.process.stop()
    assert set[str]().union(*said) == {RECORDED}
    decoded = meta["output_token_logprobs"]  # step by step: MLA's absorbed way
    tokens = torch.tensor([[*range(40, 90), *(entry[1] for entry in decoded)]])
    with torch.no_grad():
        logits = case.transformers_model(tmp_path / "sent")(tokens).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    found = torch.cat([after, torch.tensor([entry[0] for entry in decoded])])
    assert len(decoded) == 12 and (found - expected).abs().max() <= 2e-5
    assert (after - before).abs().max() > 1e-3
    derives, found = name.startswith("deepseek"), [differences(each) for each in zip(*probed, strict=True)]
    stale_and_sound = [True, False] * (1 + len(KEEPS)) * derives
    assert [each.too_large(EXACT_TOLERANCE) for each in found] == [False, *stale_and_sound]
    assert found[-1].log_probs < 1e-5 and found[-1].routes == 1.0
    assert meta["weight_version"] == str(2 + (1 + len(KEEPS)) * derives)


def test_families_say_of_themselves_what_is_tried(ran: Ran) -> None:
    tried: dict[str, bool] = {}
    for case in CASES.values():
        architecture = json.loads((ran.checkpoint(case) / "config.json").read_text())["architectures"][0]
        tried[architecture] = tried.get(architecture, False) or case.served
    tried["Qwen3MoeForCausalLM"] = True  # in tests/engines/test_weight_sync.py, on the session's server
    expected = {name: not family.support.not_served for name, family in FAMILIES.items()}
    assert tried == {name: served for name, served in expected.items() if not FAMILIES[name].support.not_trained}

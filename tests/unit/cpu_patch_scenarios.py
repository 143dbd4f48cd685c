"""What each CPU patch of megatron-core is for, as a small use of megatron-core that breaks without it.

Run as a program: prints a JSON object from patch name to how its scenario ended without the patch, and from "all" to
how all of them ended with every patch in place. Each runs in a process forked before megatron-core is imported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers  # noqa: F401  imported once, here, for the checkpoint readers of every child

from mslime.backends.cpu.megatron_patches import PATCHES, install

DEADLINE_S = 240.0
AT_ONCE = 2


def no_compile(work: Path) -> None:
    from megatron.core.jit import jit_fuser

    def function(x: int) -> int:
        return x

    assert jit_fuser(function) is function, "jit_fuser compiles"


def current_device(work: Path) -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    assert RotaryEmbedding(8, 1.0, use_cpu_initialization=True)(4).shape == (4, 1, 1, 8)


def factories(work: Path) -> None:
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    with one_process():
        assert get_grad_norm_fp32([torch.full((4,), 3.0)]) == 6.0


def synchronize(work: Path) -> None:
    from megatron.core.timers import Timers

    Timers(2, "minmax")("step", log_level=0).start()


def tensor_cuda(work: Path) -> None:
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank

    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)  # its two questions; no communication happens here
    rows = get_pos_emb_on_this_cp_rank(torch.arange(8), 0, group)  # type: ignore[arg-type]
    assert rows.tolist() == [2, 3, 4, 5]


def uneven_all_gather(work: Path) -> None:
    store = f"file://{tempfile.mkdtemp(dir=work)}/store"
    child = os.fork()
    rank = 1 if child == 0 else 0
    try:
        import megatron.core  # noqa: F401

        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        out = [torch.zeros(1), torch.zeros(3)]
        dist.all_gather(out, torch.full((1 + 2 * rank,), float(rank)))
        assert [t.tolist() for t in out] == [[0.0], [1.0, 1.0, 1.0]]
    finally:
        if child == 0:
            os._exit(0)
        dist.destroy_process_group()
        os.waitpid(child, 0)


def splits_on_cpu(work: Path) -> None:
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    splits = maybe_move_tensor_to_cpu(torch.tensor([3]), as_numpy=True)
    with one_process():
        out = torch.zeros(3)
        dist.all_to_all_single(out, torch.ones(3), output_split_sizes=splits, input_split_sizes=splits)
        assert out.tolist() == [1, 1, 1]


def norm_sequence_parallel(work: Path) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm", tensor_model_parallel_size=2,
        sequence_parallel=True,
    )  # fmt: skip
    norm = WrappedTorchNorm(config, 8)
    assert all(p.sequence_parallel for p in norm.parameters()), "its gradient would not be summed over TP"  # type: ignore[attr-defined]


def rng_state(work: Path) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with one_process(model_parallel=True):
        torch.manual_seed(0)
        expected = torch.rand(2)
        torch.manual_seed(0)
        first = torch.rand(1)
        with get_cuda_rng_tracker().fork():
            inside = torch.rand(1)
        with get_cuda_rng_tracker().fork():
            assert torch.rand(1) != inside, "the tracker's own stream does not move on"
        assert torch.equal(torch.cat([first, torch.rand(1)]), expected), "forking disturbs the stream outside"


def mla_linear(work: Path) -> None:
    with one_process(model_parallel=True):
        layer = mla_layer()
        assert layer(torch.randn(4, 1, 32), None)[0].shape == (4, 1, 32)


def mla_layer() -> Any:
    """A multi-latent attention module on the CPU specs."""
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from mslime.backends.megatron.model.chunks import block_spec

    config = MLATransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, q_lora_rank=12, kv_lora_rank=16, qk_head_dim=8,
        qk_pos_emb_head_dim=4, v_head_dim=6, multi_latent_attention=True, normalization="RMSNorm", rope_type="rope",
        rotary_scaling_factor=1.0, add_bias_linear=False, qk_layernorm=True, use_cpu_initialization=True,
        attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False,
    )  # fmt: skip
    layers = block_spec(config, torch.device("cpu"), None).layer_specs
    assert layers is not None
    return build_module(layers[0].submodules.self_attention, config=config, layer_number=1)


def zero_centred_norm(work: Path) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, normalization="RMSNorm", layernorm_zero_centered_gamma=True
    )
    norm = WrappedTorchNorm(config, 8)
    x = torch.randn(2, 8)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), eps=1e-5), rtol=0, atol=1e-5)  # type: ignore[operator]


def no_flash_mla(work: Path) -> None:
    """megatron-core's attention beside a flash_mla as it is without a driver: a second copy of the module."""
    from megatron.core.transformer import attention

    package = work / "gpu/flash_mla"
    package.mkdir(parents=True, exist_ok=True)
    words = "libcuda.so.1: cannot open shared object file"
    (package / "__init__.py").write_text(f"raise OSError({words!r})\n")
    sys.path.insert(0, str(package.parent))
    assert attention.__file__ is not None
    spec = importlib.util.spec_from_file_location(f"{attention.__name__}_again", attention.__file__)
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = again = importlib.util.module_from_spec(spec)  # where its dataclasses look for it
    spec.loader.exec_module(again)


def gated_delta_rule(work: Path) -> None:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, activation_func=torch.nn.functional.silu,
        normalization="RMSNorm", use_cpu_initialization=True, linear_conv_kernel_dim=4, linear_key_head_dim=4,
        linear_value_head_dim=4, linear_num_key_heads=2, linear_num_value_heads=2,
    )  # fmt: skip
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)
    with one_process(model_parallel=True):
        groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        layer = GatedDeltaNet(config, parts, 1, pg_collection=groups)
        assert layer(torch.randn(5, 1, 16), None)[0].shape == (5, 1, 16)


def expert_bias_in_place(work: Path) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16, use_cpu_initialization=True,
        bias_activation_fusion=False,
    )  # fmt: skip
    with one_process(model_parallel=True):
        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        expert = MLP(config, parts, is_expert=True, ffn_hidden_size=16)
        expert(torch.randn(3, 8), torch.ones(3))[0].sum().backward()


def train(work: Path) -> None:
    trainer = new_trainer(work)
    metrics = trainer.train([tiny_shard()])
    trainer.close()
    assert metrics[0]["grad_norm"] > 0


def load(work: Path) -> None:
    trainer = new_trainer(work)
    trainer.load(work / "saved")
    trainer.close()


def own_step_after_load(work: Path) -> None:
    trainer = new_trainer(work)
    trainer.load(work / "saved")
    states = [s for part in trainer.optimizer.chained_optimizers for s in part.optimizer.state.values()]
    trainer.close()
    assert len({id(state["step"]) for state in states}) == len(states), "parameters share one step"


def new_trainer(work: Path) -> Any:
    from mslime.backends.megatron.step.trainer import MegatronTrainer
    from mslime.config.resolved import policy_spec
    from mslime.config.schema import RunConfig

    config = RunConfig.model_validate(
        {
            "model": {"path": work / "model"},
            "data": {"prompts": ["none.jsonl"]},
            "cluster": {"device": "cpu"},
            "train": {"replay": "off"},
        }
    )
    return MegatronTrainer(policy_spec(config), 0, 1, f"file://{tempfile.mkdtemp(dir=work)}/store")


def tiny_shard() -> Any:
    import numpy as np

    from mslime.data.shard import TrainShard

    mask = np.arange(6) > 0
    return TrainShard(
        tokens=np.arange(6, dtype=np.int32),
        lengths=np.array([6]),
        sequence_ids=np.array([0]),
        loss_mask=mask,
        weights=mask.astype(np.float32),
        advantages=np.ones(6, np.float32),
        behaviour_log_probs=np.full(6, -5, np.float32),
        micro_batches=((0,),),
    )


@contextlib.contextmanager
def one_process(model_parallel: bool = False) -> Any:
    """A process group of one, and megatron-core's groups over it."""
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        if model_parallel:
            from megatron.core import parallel_state, tensor_parallel

            parallel_state.initialize_model_parallel()
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        yield
        if model_parallel:
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


SCENARIOS: dict[str, Callable[[Path], None]] = {
    "no_compile": no_compile,
    "current_device": current_device,
    "factories": factories,
    "synchronize": synchronize,
    "streams": train,
    "rng_device": train,
    "tensor_cuda": tensor_cuda,
    "tensor_type": train,
    "uneven_all_gather": uneven_all_gather,
    "rng_state": rng_state,
    "te_general_gemm": train,
    "splits_on_cpu": splits_on_cpu,
    "norm_sequence_parallel": norm_sequence_parallel,
    "zero_centred_norm": zero_centred_norm,
    "no_flash_mla": no_flash_mla,
    "gated_delta_rule": gated_delta_rule,
    "mla_linear": mla_linear,
    "expert_bias_in_place": expert_bias_in_place,
    "adam_state_before_load": load,
    "adam_own_step": own_step_after_load,
}


def all_at_once(work: Path) -> None:
    """Every scenario with every patch; first writes the checkpoint that the others load."""
    trainer = new_trainer(work)
    trainer.train([tiny_shard()])
    trainer.save(work / "saved", {})
    trainer.close()
    for scenario in dict.fromkeys(SCENARIOS.values()):
        scenario(work)


def start(skip: str | None, scenario: Callable[[Path], None], work: Path) -> tuple[int, int]:
    """(process id, read end of its verdict) of a fork that runs `scenario` without the patch `skip`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    verdict = "ok"
    try:
        sys.stdout = io.StringIO()
        install(skip=[skip] if skip else [])
        scenario(work)
    except BaseException as error:
        verdict = "".join(traceback.format_exception_only(error)).strip()
        if skip is None:
            verdict = traceback.format_exc()
    os.write(writer, verdict.encode()[-4000:])
    os._exit(0)


def finish(child: int, reader: int, end: float) -> str:
    """The verdict; the fork is killed at the deadline."""
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return f"did not end in {DEADLINE_S:.0f} s"
        time.sleep(0.02)
    verdict = os.read(reader, 8000).decode()
    os.close(reader)
    return verdict or "died without a word"


def main(work: Path) -> None:
    """Write every verdict."""
    torch.set_num_threads(1)
    end = time.monotonic() + DEADLINE_S
    verdicts = {"all": finish(*start(None, all_at_once, work), end)}
    waiting = [patch.name for patch in PATCHES]
    running: dict[str, tuple[int, int]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running[waiting[0]] = start(waiting[0], SCENARIOS[waiting[0]], work)
            waiting.pop(0)
        name = next(iter(running))
        verdicts[name] = finish(*running.pop(name), end)
    print(json.dumps(verdicts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

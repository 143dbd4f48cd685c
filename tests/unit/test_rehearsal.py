"""What the rehearsal of the GPU path (tests/rehearsal) rests on, as far as it runs without GPU packages: its script,
the judgement of its numbers, and the stand-ins whose arithmetic it trusts."""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.engines.trainer_ranks import PARALLEL
from tests.fixtures.families import CASES as FAMILIES
from tests.fixtures.launch_scripts import MODELS
from tests.rehearsal import adapters, extension, full_size
from tests.rehearsal.cases import LIKE, Case, cases, judge
from tests.rehearsal.cuda.build import HERE, with_stubs, written_in
from tests.rehearsal.extension import attention, context_parallel
from tests.rehearsal.outcomes import Outcome, at_most, finish, true
from tests.rehearsal.permutation import make_row_id_map, permute_with_mask_map, unpermute_with_mask_map

ROOT = Path(__file__).parents[2]
GOOD = {
    "pageable": [],
    "rows": 120, "logits": 1e-7, "log_probs": 1e-7, "gradients": 1e-7, "weights": 1e-6, "loss": 0.0, "grad_norm": 0.0,
    "changed": [], "again": 0.0, "exported": [], "layers": ["TELinear"],
}  # fmt: skip


def rehearse(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "scripts/rehearse_gpu.sh"), *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "env", "named"),
    [
        (["--nothing"], {}, "unknown option --nothing"),
        (["--venv"], {}, "--venv needs a value"),
        (["--cpu-venv", "nowhere"], {}, "no CPU environment"),
        (["--venv", "{tmp}/venv", "--out", "{tmp}/out"], {"MSLIME_MIN_FREE_GIB": "1000000"}, "needs 1000000"),
    ],
)
def test_what_is_missing_is_one_sentence_with_a_way_out(
    arguments: list[str], env: dict[str, str], named: str, tmp_path: Path
) -> None:
    (tmp_path / "cpu/bin").mkdir(parents=True)
    (tmp_path / "cpu/bin/python").symlink_to("/bin/true")
    given = [] if "--cpu-venv" in arguments else ["--cpu-venv", str(tmp_path / "cpu")]
    done = rehearse(*given, *(argument.format(tmp=tmp_path) for argument in arguments), **env)
    assert done.returncode == 1 and named in done.stderr and "hint: " in done.stderr
    assert not (tmp_path / "venv").exists()


# ------------------------------------------------------------------------------------------------ cases and judgement


def test_a_change_of_any_package_of_ours_makes_all_results_anew() -> None:
    script = (ROOT / "scripts/rehearse_gpu.sh").read_text()
    watched = script.partition('state="$(find ')[2].partition(" -type f")[0].split()
    assert {path.parent.name for path in ROOT.glob("mslime*/__init__.py")} <= set(watched)


def test_every_family_and_every_launch_script_is_rehearsed() -> None:
    found = cases()
    assert len({case.name for case in found}) == len(found)
    assert {case.family for case in found if not case.layout and case.settings["params_dtype"] == "float32"} == set(
        FAMILIES
    )
    assert sorted(LIKE) == MODELS and set(LIKE.values()) <= set(FAMILIES)
    launched = [case for case in found if case.name.startswith("run-")]
    assert {case.family for case in launched} == set(LIKE.values())
    assert any(case.settings.get("moe_permute_fusion") and case.layout.get("pp") == 2 for case in launched)
    assert all(set(case.sizes) <= set(PARALLEL) and case.ranks <= 4 for case in found)


ADAPTED = {
    "begin": 0.0, "log_probs": 1e-7, "loss": 0.0, "after": 1e-7, "moved": 1e-2, "factors": 100, "buffers": 128,
    "not_frozen": [], "gradients": 1e-7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("begin", 1e-3), ("log_probs", 1e-4), ("log_probs", math.nan), ("loss", 1e-4), ("after", 1e-4), ("moved", 0.0),
        ("factors", 0), ("buffers", 50), ("buffers", 5000), ("not_frozen", ["x"]), ("gradients", 1e-4),
    ],
)  # fmt: skip
def test_one_bad_number_of_adapters_on_one_rank_is_not_well(key: str, bad: object) -> None:
    assert all(check.well for check in adapters.judge([ADAPTED, {**ADAPTED, "gradients": None}]))
    assert not all(check.well for check in adapters.judge([{**ADAPTED, key: bad}, {**ADAPTED, key: bad}]))


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("logits", 3e-6), ("log_probs", 1e-5), ("gradients", 2e-6), ("weights", 1e-3), ("loss", 1e-5),
        ("grad_norm", 1e-5), ("changed", ["x"]), ("again", 1e-3), ("exported", ["x"]), ("rows", 0), ("layers", []),
        ("pageable", ["at x"]),
        ("logits", math.nan), ("gradients", math.inf),
    ],
)  # fmt: skip
def test_one_bad_number_of_one_rank_is_not_well(key: str, bad: object) -> None:
    case = Case("x", "qwen3-moe", {"tp": 2, "ep": 2}, {"use_distributed_optimizer": False})
    assert all(check.well for check in judge(case, [GOOD, GOOD]))
    ranks = [{**GOOD, key: bad}] * 2 if key in ("rows", "layers", "exported") else [GOOD, {**GOOD, key: bad}]
    assert not all(check.well for check in judge(case, ranks))


@pytest.mark.parametrize("component", full_size.COMPONENTS)
def test_one_component_of_a_full_size_step_that_is_not_as_planned_is_not_well(component: str) -> None:
    gib = 1 << 30
    planned = dict.fromkeys(full_size.COMPONENTS, 4 * gib) | {"gpu": 80 * gib, "reserve": gib}
    measured = dict.fromkeys(full_size.COMPONENTS, int(4.1 * gib)) | {"sync as planned": 4 * gib, "left": 0}
    found = {"layout": "TP2", "stage": 0, "tokens": 8, "planned": planned, "measured": measured | {"reserved": gib}}
    assert all(check.well for check in full_size.judge(found))
    found["measured"] = found["measured"] | {component: int(4.3 * gib)}
    assert [check.what for check in full_size.judge(found) if not check.well] == [component]


def test_a_case_that_shows_nothing_is_not_well_and_results_of_another_state_are_made_anew(tmp_path: Path) -> None:
    assert not Outcome("nothing", [], "", 1.0).well
    made: list[str] = []

    def work(name: str) -> Outcome:
        made.append(name)
        return Outcome(name, [at_most("x", 0.0, 1.0)], "", 1.0)

    assert finish(["a"], work, tmp_path, "1") == finish(["a"], work, tmp_path, "1") == 0 and made == ["a"]
    assert finish(["a"], work, tmp_path, "2") == 0 and made == ["a", "a"]
    bad = Outcome("a", [true("x", "y", False)], "", 1.0)
    assert finish(["a"], lambda name: bad, tmp_path, "3") == 1
    assert not at_most("x", math.nan, 1.0).well


# ------------------------------------------------------------------------------------------------------ the stand-ins


def test_a_symbol_that_is_written_gets_no_second_definition() -> None:
    source = (HERE / "runtime.cpp").read_text()
    assert {"cudaMalloc", "cudaGetDeviceProperties", "cublasCreate_v2", "ncclCommInitRank"} <= written_in(source)
    added = with_stubs(source, ["cudaMalloc", "cudaSomethingNew"], cpp=True).removeprefix(source)
    assert "cudaSomethingNew" in added and "cudaMalloc" not in added


def test_the_extension_knows_all_functions_of_the_real_one_and_says_which_it_does_not_compute() -> None:
    assert len(extension.FUNCTIONS) == len(set(extension.FUNCTIONS)) > 150
    assert all(callable(vars(extension)[name]) for name in extension.FUNCTIONS)
    assert {"fused_attn_fwd", "generic_gemm", "multi_tensor_adam", "thd_out_correction"} <= set(extension.IMPLEMENTED)
    with pytest.raises(extension.NotRehearsed, match="newton_schulz"):
        vars(extension)["newton_schulz"]()


@pytest.mark.parametrize("window", [(-1, 0), (3, 0)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_the_gradients_of_attention_are_those_of_autograd(window: tuple[int, int], with_sink: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, d, generator=draw, dtype=torch.float64) for heads, d in ((4, 8), (2, 8), (2, 6)))
    sink = torch.randn(4, generator=draw) if with_sink else None
    leaves = [x.requires_grad_() for x in (q, k, v, *([sink] if sink is not None else []))]
    mask = attention.Mask(0.3, True, window, sink)
    out, denominators = attention.attend(q, k, v, mask)
    upstream = torch.randn(out.shape, generator=draw, dtype=torch.float64)
    expected = torch.autograd.grad(out, leaves, upstream)
    found = attention.attend_backward(q, k, v, out, upstream, denominators, mask)
    for ours, theirs in zip(found, expected, strict=False):
        assert ours is not None
        torch.testing.assert_close(ours.double(), theirs.double(), atol=1e-6, rtol=0)


def test_a_ring_of_two_adds_up_to_whole_attention() -> None:
    """Two ranks' pieces of packed sequences, put together by the corrections as context parallelism does it."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.tensor([0, 8, 20])
    q, k, v = (torch.randn(20, 2, 4, generator=draw) for _ in range(3))
    mask = attention.Mask(0.5, True, (-1, -1), None)
    free = attention.Mask(0.5, False, (-1, -1), None)
    rows = [context_parallel.thd_get_partitioned_indices(whole, 20, 2, rank).long() for rank in range(2)]
    assert sorted(torch.cat(rows).tolist()) == list(range(20))
    cu = whole // 2

    def packed(
        x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, ends: list[list[int]], how: attention.Mask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [attention.attend(x[a:b], y[c:d], z[c:d], how) for a, b, c, d in ends]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]).T.contiguous()

    expected = torch.cat([attention.attend(q[a:b], k[a:b], v[a:b], mask)[0] for a, b in ((0, 8), (8, 20))])
    for rank in range(2):
        own, other = rows[rank], rows[1 - rank]
        out, lse = packed(q[own], k[own], v[own], [[0, 4, 0, 4], [4, 10, 4, 10]], mask)
        old = lse.clone()
        if rank == 1:  # all of its queries see the first halves of rank 0's keys
            keys, values = (context_parallel.thd_read_half_tensor(x[other], cu, 0) for x in (k, v))
            step, own_lse = packed(q[own], keys, values, [[0, 4, 0, 2], [4, 10, 2, 5]], free)
            lse = torch.logaddexp(lse, own_lse)
        else:  # its second halves see all of rank 1's keys
            queries = context_parallel.thd_read_half_tensor(q[own], cu, 1)
            step, own_lse = packed(queries, k[other], v[other], [[0, 2, 0, 4], [2, 5, 4, 10]], free)
            context_parallel.thd_second_half_lse_correction(lse, own_lse, cu, True)
        context_parallel.thd_out_correction(out, step, old, lse, own_lse, cu, rank == 0, True)
        torch.testing.assert_close(out, expected[own], atol=1e-6, rtol=0)


def test_tokens_come_back_from_their_experts() -> None:
    routed = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]])
    row_ids = make_row_id_map(routed, 5, 3)
    assert row_ids[:, [0, 1, 3, 4, 6]].tolist() == [
        [3, 0, 1, 0, 2], [5, 1, 2, 0, 2], [6, 0, 2, 0, 1], [4, 2, 1, 0, 2], [0, 0, 0, 0, 0],
    ]  # fmt: skip
    x, probs = torch.arange(10.0).reshape(5, 2), torch.rand(5, 3)
    permuted, _, row_probs = permute_with_mask_map(x, row_ids, probs, None, None, 5, 3, 7, 2, None)
    assert permuted[:, 0].tolist() == [0.0, 2.0, 6.0, 0.0, 6.0, 2.0, 4.0]
    back, own = unpermute_with_mask_map(permuted, row_ids, None, row_probs, None, 5, 3, 2)
    torch.testing.assert_close(back, x * routed.sum(1, keepdim=True))
    assert own is not None
    torch.testing.assert_close(own, probs * routed)

"""What engines say of what they hold before one gives the other its weights, and the orders between them."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from mslime.config.errors import ConfigError
from mslime.config.loader import build
from mslime.engine_plugin.peers import UNLIKE, _unlike, all_tensors, listening, signature, sum_of
from mslime.engine_plugin.wire import Transfer

RUN = {"model": {"path": "."}, "data": {"prompts": ["p.jsonl"]}}


class Attention(nn.Module):
    """As an engine has it: a parameter, a buffer, and what was derived from the parameter."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0 * width).reshape(4, width))
        self.register_buffer("scale", torch.ones(2))
        self.derived = self.weight.detach().t().contiguous()
        self.same = self.weight
        self.nothing = torch.empty(0)


def test_all_that_a_model_computes_with_is_sent_once() -> None:
    model = nn.Sequential(Attention(), Attention())
    names = ["0.weight", "0.scale", "0.derived", "1.weight", "1.scale", "1.derived"]
    assert [name for name, _ in all_tensors(model)] == names
    assert len(list(all_tensors(Attention()))) == 3


def test_sums_tell_one_bit_and_two_tensors_that_changed_places() -> None:
    tensors = [tensor for _, tensor in all_tensors(Attention(3))]
    before = sum_of(tensors)
    assert sum_of([t.clone() for t in tensors]) == before
    other = [t.clone() for t in tensors]
    other[2][1, 1] += 1
    assert sum_of(other) != before
    one, two = torch.arange(3.0), torch.arange(3.0) + 1
    assert sum_of([one, two]) != sum_of([two, one])


def told(own: Attention, others: Attention, ranks: tuple[int, int] = (1, 1)) -> list[str]:
    """What giver and taker find."""
    store, found = HashStore(), dict[str, str]()
    store.set_timeout(timedelta(seconds=20))

    def ask(part: str, model: Attention, count: int) -> None:
        order = Transfer(part, "t", "", 5)  # pyright: ignore[reportArgumentType]
        found[part] = _unlike(store, order, 0, signature(list(all_tensors(model)), count))

    threads = [
        threading.Thread(target=ask, args=args) for args in (("give", own, ranks[0]), ("take", others, ranks[1]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [found["give"], found["take"]]


def test_both_find_out_that_they_hold_other_tensors() -> None:
    assert told(Attention(), Attention()) == ["", ""]
    assert told(Attention(3), Attention(2)) == [UNLIKE, UNLIKE]
    assert told(Attention(), Attention().bfloat16()) == [UNLIKE, UNLIKE]
    assert told(Attention(), Attention(), (1, 2)) == [UNLIKE, UNLIKE], "tensors are shared out otherwise"
    turned = Attention()
    turned.derived = torch.zeros(4, 3).t()
    assert told(Attention(), turned) == [UNLIKE, UNLIKE], "the same shape, lying otherwise"


def test_the_place_to_meet_is_on_the_given_address_alone() -> None:
    store = listening("127.0.0.1", 5)
    store.set("a", "b")
    assert store.port > 0 and store.get("a") == b"b"


@pytest.mark.parametrize(
    ("sections", "field", "why"),
    [
        ({"cluster": {"placement": "colocated"}, "weights": {"transport": "shm"}}, "sglang.rejoin", "their own turn"),
        ({"lora": {"rank": 4, "sync": "adapter"}}, "sglang.rejoin", "adapters alone"),
        ({"teacher": {"rejoin": "peer"}}, "teacher.rejoin", "never change"),
    ],
)
def test_where_engines_cannot_have_weights_of_each_other_it_is_refused(
    sections: dict[str, dict[str, object]], field: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        build({**RUN, "sglang": {"rejoin": "peer"}, **sections})
    assert refused.value.field == field
    build(RUN | {"sglang": {"rejoin": "peer"}})

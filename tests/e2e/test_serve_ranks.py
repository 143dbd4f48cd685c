"""Trainer ranks of `mslime serve` under Ray, without engines: one shared pass gives clients the same results as
separate passes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import numpy as np
import pytest

from mslime.config.errors import TrainerError
from mslime.config.resolved import policy_spec
from mslime.config.serve import LossChoice
from mslime.data.client_batch import Datum, PassResult
from mslime.run.adapter_ranks import AdapterRanks
from mslime.run.ray_cluster import Cluster
from mslime_plugins.serve.served_config import adapter_config, served_config
from mslime_plugins.serve.sessions import AdapterAsk

pytest.importorskip("tinker")
CLIENTS, LOSS = range(3), LossChoice("importance_sampling")


def data_of(seed: int, broken: bool) -> list[Datum]:
    """Data; if `broken`, with advantages that are not finite."""
    rng, found = np.random.default_rng(seed), []
    for length in (9, 14, 5):
        ids = rng.integers(0, 320, (2, length)).astype(np.int32)
        one = np.ones(length, np.float32)
        found.append(Datum(ids[0], ids[1], one, one * (np.nan if broken else 1.0), one * -5.8))
    return found


def named(way: str) -> list[str]:
    return [f"{way}{client}" for client in CLIENTS]


@pytest.mark.nightly
def test_clients_in_one_pass_have_what_they_have_in_turns(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """In the second pass one of them fails alone; the server keeps all its parts."""
    from tests.e2e.test_serve import settings

    config = served_config({**settings(tiny_qwen3_moe), "output_dir": str(tmp_path)})
    own = adapter_config(config, AdapterAsk(4, 3))
    with Cluster(config, engines=False) as cluster:
        ranks = AdapterRanks(policy_spec(config), cluster, tmp_path, together=config.steps_together, survives=True)
        ranks.start()
        trainers = {name: ranks.create(name, policy_spec(own)) for way in ("turn", "pass") for name in named(way)}

        def outcome(name: str, data: list[Datum]) -> PassResult | str:
            try:
                return trainers[name].forward_backward(data, LOSS)
            except TrainerError as error:
                return str(error)

        for step in range(2):
            data = [data_of(10 * step + client, step == 1 and client == 1) for client in CLIENTS]
            # All wait for the turn, so that whoever gets it takes the others along.
            with ThreadPoolExecutor() as pool, ranks.turn.held():
                asked = [pool.submit(outcome, name, data[i]) for i, name in enumerate(named("pass"))]
                while len(ranks.turn._line) < len(asked):
                    sleep(0.01)
            for client, name in enumerate(named("turn")):
                alone, joined = outcome(name, data[client]), asked[client].result()
                assert isinstance(alone, str) == ((step, client) == (1, 1))
                if isinstance(alone, str) or isinstance(joined, str):
                    assert joined == alone
                    continue
                assert joined.loss == alone.loss
                for mine, one in zip(joined.log_probs, alone.log_probs, strict=True):
                    assert np.array_equal(mine, one)
        assert ranks.failure is None
        ranks.stop()
    assert "one pass of pass0, pass1, pass2" in (tmp_path / "trainer_rank0.log").read_text()

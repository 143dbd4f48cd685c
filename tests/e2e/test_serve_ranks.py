"""Trainer ranks of `mslime serve` under Ray, without engines: clients in one pass have what they have in turns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mslime.config.errors import TrainerError
from mslime.config.serve import LossChoice
from mslime.data.client_batch import Datum
from mslime.run.cluster import Cluster
from mslime_plugins.serve.backend import AdapterAsk, PassAsk, PassResult
from mslime_plugins.serve.ranks import RankTrainer
from mslime_plugins.serve.settings import served_config

pytest.importorskip("tinker")
CLIENTS, LOSS = range(3), LossChoice("importance_sampling")


def data_of(seed: int, broken: bool) -> list[Datum]:
    """With advantages that are no numbers where it is broken."""
    rng, found = np.random.default_rng(seed), []
    for length in (9, 14, 5):
        ids = rng.integers(0, 320, (2, length)).astype(np.int32)
        one = np.ones(length, np.float32)
        found.append(Datum(ids[0], ids[1], one, one * (np.nan if broken else 1.0), one * -5.8))
    return found


@pytest.mark.nightly
def test_clients_in_one_pass_have_what_they_have_in_turns(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    """The second time one of them fails, and it alone: no part of the server is given up."""
    from tests.e2e.test_serve import settings

    config = served_config({**settings(tiny_qwen3_moe), "output_dir": str(tmp_path)})
    fatal: list[BaseException] = []

    async def compare(trainer: RankTrainer) -> None:
        for way in ("turn", "pass"):
            for client in CLIENTS:
                await trainer.create(f"{way}{client}", AdapterAsk(4, 3))
        for step in range(2):
            data = [data_of(10 * step + client, step == 1 and client == 1) for client in CLIENTS]
            together = await trainer.add_together([PassAsk(f"pass{client}", data[client], LOSS) for client in CLIENTS])
            for client, joined in enumerate(together):
                try:
                    alone: Any = await trainer.pass_over(f"turn{client}", data[client], LOSS, backward=True)
                except TrainerError as error:
                    assert (step, client) == (1, 1) and isinstance(joined, TrainerError) and str(joined) == str(error)
                    continue
                assert isinstance(joined, PassResult) and joined.loss == alone.loss and (step, client) != (1, 1)
                for mine, own in zip(joined.log_probs, alone.log_probs, strict=True):
                    assert np.array_equal(mine, own)

    with Cluster(config, engines=False) as cluster:
        trainer = RankTrainer(config, cluster, tmp_path, fatal.append)
        trainer.start()
        asyncio.run(asyncio.wait_for(compare(trainer), 240))
        assert not fatal
        trainer.stop()

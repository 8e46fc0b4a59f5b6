"""One linear layer on three or four ranks: training, and going on from a checkpoint, in every way."""

import pytest
import tiny_model_jobs as jobs
from ranks import run_ranks
from recipes import WAYS
from thinning import FULL


@pytest.mark.parametrize("world, ranks_per_node", [(4, 2), (3, 1), (3, 3)])
def test_they_train_and_go_on(world, ranks_per_node, tmp_path):
    settings = {"world": world, "ranks_per_node": ranks_per_node, "folder": str(tmp_path)}
    # On three ranks every way on three nodes or on one.
    ways = list(WAYS) if FULL or world == 4 else ["lossless", *list(WAYS)[ranks_per_node == 3 :: 2]]
    for found in run_ranks(jobs.gone_on, ways=[None, *ways], **settings):
        for way, (losses, others, changed) in found.items():
            assert others == losses and not changed, way
            assert losses == pytest.approx(found[None][0], rel=0.05), way
        assert found["lossless"][0] == found[None][0]

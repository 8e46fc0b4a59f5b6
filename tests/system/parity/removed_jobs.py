"""Features that DeepSpeed had before 0.19.7 and has removed: stock, `lossless` and `zeropp` train with them in turn."""

from __future__ import annotations

from breadth_jobs import Case, compared
from models import llama, section
from running import Spec
from torch import nn


class Scheduled(nn.Module):
    """A Llama that does as the engine tells its forward: a share of the loss, as many tokens as there are."""

    def __init__(self, config):
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids, labels, progressive_layer_drop=False, pld_theta=1.0, curriculum_seqlen=None):
        assert progressive_layer_drop or curriculum_seqlen
        output = self.inner(input_ids=input_ids[:, :curriculum_seqlen], labels=labels[:, :curriculum_seqlen])
        output.loss = output.loss * pld_theta
        return output


LENGTHS = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 32, "schedule_type": "fixed_linear"}
LENGTHS["schedule_config"] = {"total_curriculum_step": 3, "difficulty_step": 8}
SIZES = {"max_train_batch_size": 4, "micro_batch_sizes": [2], "min_gpus": 1, "max_gpus": 2, "version": 0.1}
REMOVED = {
    "sparse_gradients": Case({"sparse_gradients": True}),
    "progressive_layer_drop": Case(
        {"progressive_layer_drop": {"enabled": True, "theta": 0.5, "gamma": 0.5}}, Scheduled
    ),
    "curriculum_learning": Case({"curriculum_learning": {"enabled": True, **LENGTHS}}, Scheduled),
    "elasticity": Case({"elasticity": {"enabled": True, "ignore_non_elastic_batch_info": True, **SIZES}}),
}


def beside_stock(case):
    return compared(REMOVED[case])


def one_bit():
    """Make an engine, whose constructor raises."""
    optimizer = {"type": "OneBitAdam", "params": {"lr": 1e-3}}
    Spec(section("zeropp"), config={"optimizer": optimizer}, optimizer=None).engine()

"""Random layer-token drop of DeepSpeed's data efficiency: layers of an engine that is there get some of the tokens."""

from __future__ import annotations

from unittest import mock

import torch
from deepspeed.ops.random_ltd import dropping_utils
from deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd
from models import train
from running import shared_folder

SCHEDULE = {"require_steps": 6, "seq_per_step": 8}
ROUTED = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [0, 1],
    "model_mask_name": None,
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 8,
        "max_value": 32,
        "schedule_type": "fixed_linear",
        "schedule_config": SCHEDULE,
    },
}
KEYS = {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ROUTED}}}


class TokensInTorch:
    """DeepSpeed's operations, which have to be compiled and are for GPUs alone."""

    def token_sort_(self, indices, length):
        return indices.sort(dim=-1).values

    def token_gather(self, tokens, indices, batch_first):
        return tokens.gather(1, self._whole_rows(indices, tokens))

    def token_scatter_(self, tokens, part, indices, batch_first):
        return tokens.scatter_(1, self._whole_rows(indices, tokens), part)

    def _whole_rows(self, indices, tokens):
        return indices.long().unsqueeze(-1).expand(-1, -1, tokens.shape[-1])


def of_fewer_positions(module, args, inputs):
    """Cosines and sines for as many tokens as the layer is given."""
    positions = tuple(part[:, : args[0].shape[1]] for part in inputs["position_embeddings"])
    return args, {**inputs, "position_embeddings": positions}


def unwrap(layers):
    for place, wrapper in enumerate(layers):
        layers[place] = wrapper.random_ltd_layer


def by_token_drop(engine):
    """The losses. A checkpoint names weights as without wrappers, so it is loaded without them."""
    layers, seen, kept = engine.module.model.layers, train(engine, 1), []
    for layer in layers:
        layer.register_forward_pre_hook(of_fewer_positions, with_kwargs=True)
        layer.register_forward_pre_hook(lambda module, args: kept.append(args[0].shape[1]))
    torch.manual_seed(3)
    with mock.patch.object(dropping_utils, "random_ltd_module", TokensInTorch()):
        convert_to_random_ltd(engine, type(layer))
        seen += train(engine, 3)
        engine.save_checkpoint(folder := shared_folder())
        unwrap(layers)
        engine.load_checkpoint(folder)
        convert_to_random_ltd(engine, type(layer))
        assert engine.random_ltd_scheduler.get_current_seq() == kept[-1]
        seen += train(engine, 2)
    unwrap(layers)
    assert kept == [length for length in (8, 16, 16, 24, 24) for _ in layers], kept
    return seen

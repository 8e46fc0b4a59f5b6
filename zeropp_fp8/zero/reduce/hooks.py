"""Collect autograd's gradients, parameter by parameter, into units in their order or into buckets as they come."""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.zero.reduce.order import FixedOrder, reduction_units

_LEAF = "ds_z3_leaf_module"


class GradientHooks:
    """The gradient hooks of one stage.

    Attributes:
        order: the order of the units; None if buckets are filled as gradients come.
    """

    def __init__(self, stage) -> None:
        self.stage = stage
        self.order: FixedOrder | None = None

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Reduce every parameter from its own gradient hook, blocks (z3 leaf modules) included.

        DeepSpeed reduces a leaf module from a full backward hook of the module, which fires before the gradients
        exist if no input of the block needs one (a frozen embedding under LoRA). The unit order keeps blocks together
        without that hook, and gives the same buckets as stock's leaf modules.
        """
        stage = self.stage
        stage.session.on_model.callback(self.take_no_more)
        trainable = [param for group in stage.fp16_groups for param in group]
        keys = {sharded.key(param): param for param in trainable}
        stage.reduction.begin({key: stage.param_names.get(param, str(key)) for key, param in keys.items()})
        stage.parameter_offload.before_backward = stage.backwards.module_reached
        if not self._uses_fixed_order():
            stage.stock.create_reduce_and_remove_grad_hooks()
            return
        self.order = self._order_of(trainable)
        self._users = Counter(id(p) for module in stage.module.modules() for p in module.parameters(recurse=False))
        self._used_by_only: dict[tuple[int, bool], list[Parameter]] = {}
        stage.parameter_offload.after_backward_of = self._module_ended
        leaf_of = {param: param.__dict__.pop(_LEAF) for param in trainable if _LEAF in param.__dict__}
        stage.stock.create_reduce_and_remove_grad_hooks()
        for param, leaf in leaf_of.items():
            setattr(param, _LEAF, leaf)
        for param, handle in zip((p for p in trainable if p.requires_grad), stage._grad_acc_hooks, strict=True):
            handle.hooks_dict_ref()[handle.id] = functools.partial(self.reduce_ready_partitions_and_remove_grads, param)

    def _uses_fixed_order(self) -> bool:
        """Whether units have a fixed order: not with `lossless` at module granularity, which promises stock buckets."""
        config = self.stage.session.config
        return config.quantizes or config.gather_granularity == "block"

    def _order_of(self, trainable: list[Parameter]) -> FixedOrder:
        stage = self.stage
        own = stage.session.config.reduces_gradients
        units = reduction_units(
            trainable,
            stage.module.parameters(),
            stage.parameter_offload.blocks,
            # Stock's buckets are filled parameter by parameter, so there is nothing to join for them.
            joined_numel=stage.reduce_bucket_size if own else 0,
        )
        if own:
            stage.reduction.order_is_known([param for unit in units for param in unit])
        return FixedOrder(units, stage.reduction.reduce_unit if own else stage.buckets.put)

    def take_no_more(self) -> None:
        """Leave gradients to other engines over the model: this engine has ended, or was collected."""
        stage = self.stage
        for hook in (*stage._grad_acc_hooks, *stage._leaf_module_hooks):
            hook.remove()
        stage.parameter_offload.before_backward = stage.parameter_offload.after_backward_of = None

    def reduce_ready_partitions_and_remove_grads(self, param: Parameter, tensor: Tensor | None = None) -> None:
        """Also replace DeepSpeed's hook, which takes 30 Python calls per parameter to find where a backward ends."""
        stage = self.stage
        if torch._C._current_graph_task_id() != stage.backwards.looked_at:
            stage.backwards.gradient_came()
        if stage.buckets.are_stale:
            stage.buckets.zero_stale()
        if stage._coalesce_grad_reduction:
            return  # DeepSpeed calls this again when the script has run all of its backwards
        if self.order is None:
            stage.buckets.put([param])
        elif getattr(param, "ds_grad_is_ready", True):  # false while a tiled computation still adds to it
            self.order.is_ready(param)

    def _module_ended(self, module: nn.Module) -> None:
        """End a module's backward: parameters that no other module has get no more gradients."""
        if not self.stage.backwards.one_runs:  # it is torch.autograd.grad(), or a loss in tiles
            return
        leaf = sharded.is_leaf(module)  # another engine over the model may have marked it
        params = self._used_by_only.get((id(module), leaf))
        if params is None:
            params = [p for p in module.parameters(recurse=leaf) if self._users[id(p)] == 1]
            self._used_by_only[id(module), leaf] = params
        if params and not self.stage._coalesce_grad_reduction:
            self.order.module_ended(params)

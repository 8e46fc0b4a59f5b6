"""ZeRO-3 whose reduced gradients and optimizer states rest in low precision (FP8-LM, levels O1 and O2).

DeepSpeed's optimizer keeps 16 bytes a parameter: fp32 master weights, gradients and two moments. Here reduced gradients
can be FP8 (GradientStore), master weights and moments FP16 and FP8 (CompressedStates). Everything that looks into them
(clipping, overflow checks, safe_get_full_*, checkpoints) is answered with decoded numbers; a checkpoint holds fp32 as
stock's does, and resumes bit for bit, because with power-of-two scales decoded numbers encode to themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from deepspeed import comm as ds_comm
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.utils import logger
from torch import Tensor, nn
from torch.nn import Parameter

from zeropp_fp8.config import ConfigError
from zeropp_fp8.optim import FP8AdamW
from zeropp_fp8.zero.owners.stage3 import WholeTensorStage3
from zeropp_fp8.zero.reduce.scales import GradientScales
from zeropp_fp8.zero.session import Session
from zeropp_fp8.zero.states.block_gradient_store import BlockGradientStore
from zeropp_fp8.zero.states.compressed import CompressedStates, chosen_formats, decouples_weight_decay
from zeropp_fp8.zero.states.gradient_store import GradientStore
from zeropp_fp8.zero.states.groups import StateGroup, make_state_groups

GRAD_PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


class LowPrecisionStage3(WholeTensorStage3):
    """ZeRO-3 with a place for gradients and states in low precision; without, it is DeepSpeed's."""

    def __init__(self, module, init_optimizer, param_names, *args, session: Session, **kwargs) -> None:
        self.session = session
        self.scales: GradientScales | None = None  # where gradients travel with scales that ranks share
        self.store: GradientStore | None = None  # where reduced gradients rest in FP8
        self.states: CompressedStates | None = None  # where master weights and moments rest in low precision
        self._keeps_codes = session.config.gradients.store_format != "none"
        session.state_formats = chosen_formats(session.config, init_optimizer)
        self._compresses = session.state_formats is not None
        offload = kwargs.get("offload_optimizer_config")
        if self._compresses and offload is not None and offload.device != OffloadDeviceEnum.none:
            raise ConfigError(
                '"zero_optimization.offload_optimizer" keeps fp32 states on the CPU, where FP8AdamW keeps them in low '
                "precision on the device; remove one of the two"
            )
        self._loads_states = True  # whether the last load was of states, not of weights only
        super().__init__(module, init_optimizer, param_names, *args, **kwargs)

    # -- construction ----------------------------------------------------------------------------------------------

    def _setup_for_real_optimizer(self) -> None:
        if not self._keeps_codes:
            super()._setup_for_real_optimizer()
            return
        # DeepSpeed allocates a buffer for all gradients here, which the store replaces: let it be small.
        dtype = self.gradient_accumulation_dtype
        self.gradient_accumulation_dtype = torch.uint8
        super()._setup_for_real_optimizer()
        self.gradient_accumulation_dtype = dtype
        self.grad_partitions_flat_buffer = torch.empty(0, dtype=dtype, device=self.device)
        getattr(self, GRAD_PARTITIONS).clear()

    def _create_fp32_partitions(self) -> None:
        if not self._compresses:
            super()._create_fp32_partitions()
            return
        for ids in self.fp16_partitioned_groups_flat_id:
            # The optimizer's param_groups and DeepSpeed's lists want a tensor a sub-group; its numbers are elsewhere.
            empty = torch.empty(0, dtype=torch.float32, device=self.device)
            empty.ds_id = f"{ids[0]}_{ids[-1]}"
            empty.requires_grad = True
            self.fp32_partitioned_groups_flat.append(empty)
        self.states = CompressedStates(self.state_groups, self.session.state_formats)
        for group in self.optimizer.param_groups:
            group["params"] = []

    def initialize_optimizer_states(self) -> None:
        if not self._compresses:
            super().initialize_optimizer_states()

    @property
    def state_groups(self) -> list[StateGroup]:
        """Made once DeepSpeed has its sub-groups."""
        if not hasattr(self, "_state_groups"):
            self._state_groups = make_state_groups(self.fp16_groups, self.session.own_numel, self.session.device)
        return self._state_groups

    def _make_gradient_scales(self, params: list[Parameter]) -> None:
        """Once the order of reduction is known: the scales of `params`, and the store."""
        if self.session.config.gradients.scales == "tensor":
            self.scales = GradientScales(self.session, params, [self.param_names[p] for p in params])
        if self._keeps_codes:
            gradients, dtype = self.session.config.gradients, self.gradient_accumulation_dtype
            if self.scales is not None:
                self.store = GradientStore(self.session.inter_format, self.scales, self.state_groups, dtype)
            else:
                element, block_size = gradients.store_format, gradients.block_size
                self.store = BlockGradientStore(element, block_size, self.state_groups, dtype)
            # DeepSpeed makes lists of these at the end of every backward; what reads them is replaced below.
            getattr(self, GRAD_PARTITIONS).update((p.ds_id, self.store.view(p)) for p in params)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _own_part(self, param: Parameter, values: Tensor) -> Tensor:
        """This rank's elements of a flat or shaped full tensor."""
        return self.session.placement.own_part(param, values)

    def _padded(self, param: Parameter, own: Tensor) -> Tensor:
        """A slice as DeepSpeed has it: zeros beyond the tensor's end."""
        return nn.functional.pad(own, (0, param.partition_numel() - own.numel()))

    @torch.no_grad()
    def partition_grads(self, params_to_release: list[Parameter], grad_partitions: list[Tensor]):
        if self.store is None:
            return super().partition_grads(params_to_release, grad_partitions)
        for param, part in zip(params_to_release, grad_partitions):
            own = part.view(-1)[: self.session.own_numel(param)]
            self.store.write(param, own if self.micro_step_id == 0 else own + self.store.read(param))
            param.grad = None
        return []

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        if self.store is None or not partition_gradients:
            return super().has_overflow(partition_gradients)
        bad = torch.stack(self._square_sums()).isfinite().all().logical_not_().to(torch.uint8)
        ds_comm.all_reduce(bad, op=ds_comm.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=bad, op=ds_comm.ReduceOp.MAX)
        return bool(bad.item())

    def _square_sums(self, counted: Callable[[Parameter], bool] | None = None) -> list[Tensor]:
        self.store.close()
        return [self.store.square_sum(i, counted) for i in range(len(self.fp16_groups))]

    def _counts_in_norm(self, param: Parameter) -> bool:
        """With tensor parallelism what all its ranks hold counts once, as in DeepSpeed's get_grad_norm_direct."""
        return is_model_parallel_parameter(param) or self.model_parallel_rank == 0

    def _get_norm_groups(self) -> list[Tensor]:
        if self.store is None:
            return super()._get_norm_groups()
        tensor_parallel = self.model_parallel_group is not None
        squares = torch.stack(self._square_sums(self._counts_in_norm if tensor_parallel else None))
        ds_comm.all_reduce(squares, op=ds_comm.ReduceOp.SUM, group=self.session.topology.group)
        self._model_parallel_all_reduce(tensor=squares, op=ds_comm.ReduceOp.SUM)
        norms = squares.sqrt()
        # DeepSpeed's mark for a norm that is not finite.
        return list(torch.where(norms.isfinite(), norms, torch.full_like(norms, -1.0)))

    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        if self.states is not None:
            return  # the fused step reads gradients where they are
        if self.store is None:
            super()._prepare_fp32_grad_for_sub_group(sub_group_id)
            return
        parts = [self._padded(p, self.store.read(p)) for p in self.fp16_groups[sub_group_id]]
        flat = self.fp32_partitioned_groups_flat[sub_group_id]
        flat.grad = torch.cat(parts).to(flat.dtype)
        self.averaged_gradients[sub_group_id] = None

    # -- the step ----------------------------------------------------------------------------------------------------

    def _drop_gradients_of_frozen(self) -> None:
        """As in stock, what is frozen as the step begins has a gradient of zeros, whatever came before."""
        if self.store is None and self.states is None:
            return  # DeepSpeed's own lists hold zeros
        partitions = getattr(self, GRAD_PARTITIONS)
        for param in (p for group in self.fp16_groups for p in group if not p.requires_grad):
            if self.store is not None:
                self.store.drop_sum(param)
            else:
                partitions[param.ds_id].zero_()

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Tensor) -> None:
        if self.states is None:
            super().unscale_and_clip_grads(sub_group_id, total_norm)
            return
        # In fp64, for a norm of fp32 numbers may be beyond fp32.
        scale = torch.full((1,), float(self.loss_scale), dtype=torch.float64, device=self.session.device)
        if self.clip_grad > 0.0:
            norm = torch.as_tensor(total_norm, device=scale.device).to(torch.float64)
            scale = scale * ((norm / self.loss_scale + 1e-6) / self.clip_grad).clamp(min=1.0)
        self._grad_scale = (1.0 / scale).to(torch.float32)

    def _optimizer_step(self, sub_group_id: int) -> None:
        if self.states is None:
            super()._optimizer_step(sub_group_id)
            return
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        beta1, beta2 = group["betas"]
        hyper = {
            "lr": float(group["lr"]),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "eps": float(group["eps"]),
            "weight_decay": float(group["weight_decay"]),
            "decoupled": decouples_weight_decay(self.optimizer, group),
            "bias_correction": bool(group.get("bias_correction", True)),
        }
        generator = self.session.generators["states"]
        self.states.update(sub_group_id, self._gradients_of, hyper, self._grad_scale, generator)

    def _gradients_of(self, group: StateGroup):
        if self.store is not None:
            return self.store.of(group)
        partitions = getattr(self, GRAD_PARTITIONS)
        sizes = zip(group.params, group.segments.numels)
        return [partitions[param.ds_id].view(-1)[:numel] for param, numel in sizes]

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if self.states is None:  # else the fused step has written the weights
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    # -- looking at gradients and states, and changing them ----------------------------------------------------------

    def _get_fp32_grad_state_partition(self, param: Parameter, release_swap_buffers: bool):
        if self.store is None:
            return super()._get_fp32_grad_state_partition(param, release_swap_buffers)
        return self._padded(param, self.store.read(param)), self.grad_position[self.get_param_id(param)][0]

    def set_fp32_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        if self.store is None:
            super().set_fp32_grad_for_param(value, param)
        elif param.requires_grad:
            self.store.write(param, self._own_part(param, value))

    def set_local_grad_for_param(self, value: Tensor, param: Parameter) -> None:
        if self.store is None:
            super().set_local_grad_for_param(value, param)
        elif param.requires_grad:
            _check_local_size(param, value)
            self.store.write(param, value.reshape(-1)[: self.session.own_numel(param)])

    def update_fp32_grad_for_param_vectorized(self, update_func, param_list) -> None:
        if self.store is None:
            super().update_fp32_grad_for_param_vectorized(update_func, param_list)
            return
        for param in param_list:
            if param.requires_grad:
                full = self._fp32_state_allgather(param, self._padded(param, self.store.read(param)))
                self.store.write(param, self._own_part(param, update_func(full, param)))

    def get_fp32_grad_partitions(self) -> dict[int, dict[int, Tensor]]:
        if self.store is None:
            return super().get_fp32_grad_partitions()
        return {
            i: {k: self._padded(p, self.store.read(p)) for k, p in enumerate(sub_group)}
            for i, sub_group in enumerate(self.fp16_groups)
        }

    def _get_fp32_opt_state_partition(self, param: Parameter, release_swap_buffers: bool, optim_state_key=None):
        if self.states is None:
            return super()._get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)
        own = self.states.read(param, optim_state_key)
        return self._padded(param, own), self.grad_position[self.get_param_id(param)][0]

    def set_full_hp_param(self, value: Tensor, param: Parameter, optim_state_key=None) -> None:
        if self.states is None:
            super().set_full_hp_param(value, param, optim_state_key)
        elif param.requires_grad:
            if value.numel() != param.ds_numel:
                raise ValueError(f"the parameter has {param.ds_numel} elements, the value {value.numel()}")
            self.states.write(param, self._own_part(param, value), optim_state_key)

    def set_local_hp_param(self, value: Tensor, param: Parameter, optim_state_key=None) -> None:
        if self.states is None:
            super().set_local_hp_param(value, param, optim_state_key)
        elif param.requires_grad:
            _check_local_size(param, value)
            self.states.write(param, value.reshape(-1)[: self.session.own_numel(param)], optim_state_key)

    def offload_states(self, *args, **kwargs) -> None:
        """DeepSpeed moves its own buffers, which are not where the numbers are.

        Raises:
            RuntimeError: states or gradients are kept in low precision.
        """
        if self.store is not None or self.states is not None:
            raise RuntimeError(
                "zeropp_fp8: offload_states does not know gradients and states in low precision; they take 6 bytes a "
                "parameter instead of 16. Leave the call out, or set gradients.store_format to none and the "
                "optimizer's formats to fp32"
            )
        super().offload_states(*args, **kwargs)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    @contextmanager
    def _expanded(self, write_back: bool) -> Iterator[None]:
        """While it lasts, DeepSpeed's lists hold fp32 states, on the CPU; `write_back`: take over what they become."""
        if self.states is None:
            yield
            return
        empty = self.fp32_partitioned_groups_flat
        counts_on_host = not isinstance(self.optimizer, torch.optim.Adam)  # DeepSpeed's optimizers count in an int
        flats = []
        for i, sub_group in enumerate(self.fp16_groups):
            parts = {key: [self._padded(p, self.states.read(p, key)).cpu() for p in sub_group] for key in _STATE_KEYS}
            flat = torch.cat(parts[None])
            flat.ds_id = empty[i].ds_id
            flat.requires_grad = True
            steps = self.states.steps[i]
            state = {"step": steps if counts_on_host else torch.tensor(float(steps))}
            state |= {key: torch.cat(parts[key]) for key in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[flat] = state
            flats.append(flat)
        self.fp32_partitioned_groups_flat = flats
        try:
            yield
            if write_back:
                self._take_back()
        finally:
            for flat in self.fp32_partitioned_groups_flat:
                self.optimizer.state.pop(flat, None)
            self.fp32_partitioned_groups_flat = empty

    @torch.no_grad()
    def _take_back(self) -> None:
        """Encode what DeepSpeed's lists hold; the model's weights follow the rounded master weights."""
        for i, sub_group in enumerate(self.fp16_groups):
            flat = self.fp32_partitioned_groups_flat[i]
            # load_state_dict puts new dictionaries into the optimizer's state.
            state = self.optimizer.state.get(flat, {})
            offset = 0
            for param in sub_group:
                own = slice(offset, offset + self.session.own_numel(param))
                self.states.write(param, flat.detach()[own])
                for key in ("exp_avg", "exp_avg_sq") if self._loads_states else ():
                    if key in state:  # a checkpoint saved before the first step of stock's optimizer has none
                        self.states.write(param, state[key][own], key)
                offset += param.partition_numel()
            self.states.steps[i] = int(state.get("step", 0))
        self.states.write_weights()

    def _rigid_state_dict(self) -> dict:
        with self._expanded(write_back=False):
            return super()._rigid_state_dict()

    @contextmanager
    def _plain_optimizer(self) -> Iterator[None]:
        """While it lasts, FP8AdamW is represented by an optimizer that loads fp32 states as they are."""
        given = self.optimizer
        if self.states is None or not isinstance(given, FP8AdamW):
            yield
            return
        self.optimizer = _AnyStates([dict(group) for group in given.param_groups], {})
        try:
            yield
            for group, loaded in zip(given.param_groups, self.optimizer.param_groups):
                group.update((name, value) for name, value in loaded.items() if name != "params")
        finally:
            self.optimizer = given

    def _rigid_load_state_dict(self, state_dict: dict, load_optimizer_states: bool = True) -> None:
        self._loads_states = load_optimizer_states
        with self._plain_optimizer(), self._expanded(write_back=True):
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir) -> None:
        self._loads_states = True
        with self._expanded(write_back=True):
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)

    def load_module_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir, load_from_fp32_weights) -> None:
        self._loads_states = False
        with self._expanded(write_back=True) if load_from_fp32_weights else nullcontext():
            super().load_module_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir, load_from_fp32_weights)

    def _restore_from_bit16_weights(self) -> None:
        if self.states is None:
            super()._restore_from_bit16_weights()
        else:
            self.states.take_weights()

    def _own_states(self) -> dict:
        """What of gradients and states is not in DeepSpeed's part of a checkpoint."""
        extra = {}
        if self.scales is not None:
            extra["gradient_scales"] = self.scales.state_dict()
        if self.states is not None and self.states.formats.expand_range:
            extra["states"] = self.states.raw()  # decoded numbers would not encode to themselves
        return extra

    def _load_own_states(self, extra: dict) -> None:
        if self.scales is not None:
            try:
                self.scales.load_state_dict(extra.get("gradient_scales"))
            except ValueError as error:
                self.scales.load_state_dict(None)
                if ds_comm.get_rank() == 0:
                    logger.warning(f"zeropp_fp8: {error}; gradient scales start afresh")
        if self.states is not None and "states" in extra and self._loads_states:
            try:
                self.states.load_raw(extra["states"])
            except ValueError as error:  # other formats: the fp32 numbers of DeepSpeed's part have been taken
                if ds_comm.get_rank() == 0:
                    logger.warning(f"zeropp_fp8: {error}; states are rounded to the formats of this run")
            self.states.write_weights()


_STATE_KEYS = (None, "exp_avg", "exp_avg_sq")


def _check_local_size(param: Parameter, value: Tensor) -> None:
    """A local value has the size of DeepSpeed's partition, padding included."""
    if value.numel() != param.partition_numel():
        raise ValueError(f"this rank's part has {param.partition_numel()} elements, the value {value.numel()}")


class _AnyStates(torch.optim.Optimizer):
    """Holds states and options."""

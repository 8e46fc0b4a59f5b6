"""Patches between others' tests and the libraries here, in every process that a test starts.

Python imports it at every start where this folder is in PYTHONPATH. On a CPU it says to Accelerate, transformers and
DeepSpeed that ranks are on an accelerator: the tests ask for GPUs, and the libraries themselves allow neither DeepSpeed
nor 16-bit numbers there; what DeepSpeed does on gloo, it does all the same. A module is changed
when it has been imported.
"""

import importlib.abc
import os
import sys


def _accelerate_state(module):
    prepare = module.PartialState._prepare_backend

    def on_gloo(self, *args, **kwargs):
        backend, kind = prepare(self, *args, **kwargs)
        if kind == module.DistributedType.NO and "LOCAL_RANK" in os.environ:
            return "gloo", module.DistributedType.MULTI_CPU
        return backend, kind

    module.PartialState._prepare_backend = on_gloo


def _accelerate_testing(module):
    module.require_non_cpu = module.require_multi_device = lambda test: test
    module.device_count = 2


def _transformers_testing(module):
    module.require_torch_accelerator = module.require_torch_multi_accelerator = lambda test: test
    module.BACKEND_DEVICE_COUNT["cpu"] = lambda: 2


def _training_args(module):
    module.is_torch_bf16_gpu_available = lambda: True


def _deepspeed(module):
    # Compiled at the first group otherwise, for half a minute and for nothing that is used here.
    module.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It refuses fp16 where the CPU has no instructions for it; torch computes in it all the same.
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True


def _parameters(module):
    """DeepSpeed 0.19.8 broadcasts parameters as bytes; torch refuses this view of 16 bits without dimensions."""
    torch = module.torch
    view = torch.Tensor.view

    def with_a_dimension(self, *shape, **dtype):
        scalar = shape == (torch.uint8,) and self.dim() == 0
        return view(self.reshape(1) if scalar else self, *shape, **dtype)

    torch.Tensor.view = with_a_dimension


def _trl_imports(module):
    """Tests of another TRL ask for optional packages that this one does not know; what needs them is skipped."""

    def unknown(name):
        if name.startswith("is_") and name.endswith("_available"):
            return lambda: False
        raise AttributeError(name)

    module.__getattr__ = unknown


CHANGES = {"trl.import_utils": _trl_imports, "deepspeed.runtime.zero.partition_parameters": _parameters}
ON_CPU = {
    "accelerate.state": _accelerate_state,
    "accelerate.test_utils.testing": _accelerate_testing,
    "transformers.testing_utils": _transformers_testing,
    "transformers.training_args": _training_args,
    "deepspeed": _deepspeed,
}


if os.environ.get("DS_ACCELERATOR") == "cpu":
    CHANGES |= ON_CPU


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader.exec_module = _changing(spec.loader.exec_module, CHANGES[name])
                return spec
        return None


def _changing(execute, change):
    def exec_module(module):
        execute(module)
        change(module)

    return exec_module


sys.meta_path.insert(0, _Finder())

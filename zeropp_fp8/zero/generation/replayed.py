"""The decoding step as a CUDA graph: recorded once for a sequence, replayed for each of its tokens.

A token's forward pass is a thousand launches, for which Python takes four times as long as the kernels ("host" and
"kernels" of benchmarks/generation.py). With transformers' static cache each pass launches the same kernels with the
same addresses, so the driver can repeat them. Inputs are copied to where they read, results from where they write.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

# What `generate` is told besides. transformers would compile the step itself: half a minute, again in each context.
STATIC = {"cache_implementation": "static", "disable_compile": True}

Recorder = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]


def recorded(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """(what repeats the work of `step`, what it returns each time, at the same addresses); nothing is computed yet."""
    graph = torch.cuda.CUDAGraph()
    torch.clear_autocast_cache()  # casts in there are freed before the graph is, and those made in it after it
    # NCCL's watchdog asks for events in a thread of its own, which "global" would take for a part of this.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step()
    torch.clear_autocast_cache()
    return graph.replay, outputs


def check_replayable(module: nn.Module, device: torch.device) -> None:
    """
    Raises:
        ValueError: no CUDA device, or no transformers model of a decoder alone.
    """
    if device.type != "cuda":
        raise ValueError(f"generation: graph=True needs a CUDA device, not {device.type}: leave it out")
    model = _generating_model(module)
    if model is None or model.config.is_encoder_decoder:
        raise ValueError(
            f"generation: graph=True needs a decoder with transformers' generate, which {type(module).__name__} is "
            "not: leave it out"
        )


@contextlib.contextmanager
def replayed(module: nn.Module, forget: Callable[[], None]) -> Iterator[None]:
    """Decoding steps of a model are recorded and replayed.

    Args:
        module: whose weights stay where they are, or has them decoded in the step.
        forget: drops what a step would find computed by an earlier one, or leave to a later one.
    """
    model = _generating_model(module)
    own = model.__dict__.get("forward")
    model.forward = _replaying(model.forward, forget)
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _generating_model(module: nn.Module) -> nn.Module | None:
    """The model whose forward `generate` calls for each token; PEFT's lies around it."""
    from transformers.generation import GenerationMixin

    return next((m for m in module.modules() if isinstance(m, GenerationMixin)), None)


def _replaying(forward: Callable, forget: Callable[[], None]) -> Callable:
    """A model's forward, of which steps that are alike are recorded at the second and replayed from there on."""
    last: _Step | None = None

    @functools.wraps(forward)
    def with_replay(*args, **kwargs):
        nonlocal last
        tokens, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
        if args or tokens is None or tokens.shape[1] != 1 or cache is None or not cache.is_initialized:
            last = None  # a prompt: what was recorded is for another sequence
            return forward(*args, **kwargs)
        step = _Step(cache, kwargs)
        if last is None or not last.takes(step):
            last = step
            return forward(**kwargs)  # by itself once: kernels are compiled and libraries begin
        if last.replay is None:
            last.record(forward, forget)
        return last(step)

    return with_replay


class _Step:
    """A decoding step for a cache; `replay` repeats it, once it is recorded."""

    def __init__(self, cache, kwargs: dict[str, Any]) -> None:
        _check_cache(cache)
        self._cache = cache
        self._held = [tensor for layer in cache.layers for tensor in vars(layer).values() if isinstance(tensor, Tensor)]
        self._kwargs = {name: value for name, value in kwargs.items() if name != "past_key_values"}
        leaves, self._spec = tree_flatten(self._kwargs)
        self._tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._kinds = [(t.shape, t.dtype, t.device) if isinstance(t, Tensor) else t for t in leaves]
        self.replay: Callable[[], None] | None = None

    def takes(self, other: _Step) -> bool:
        """Whether the other is the same but for the values of tensors.

        Raises:
            ValueError: there are other tensors in the same cache.
        """
        if self._cache is not other._cache:
            return False
        if list(map(id, self._held)) != list(map(id, other._held)):
            raise ValueError(
                "generation: graph=True needs a cache that stays where it is, which it does not in beam search: "
                "leave one of them out"
            )
        return self._spec == other._spec and self._kinds == other._kinds

    def record(self, forward: Callable, forget: Callable[[], None]) -> None:
        """
        Raises:
            RuntimeError: the model asks the device for a number, or does what else no graph can hold.
        """
        with torch.inference_mode(False):  # a tensor of that mode could only be written to within it
            copies = {id(tensor): tensor.clone() for tensor in self._tensors}
        kwargs = tree_map(lambda leaf: copies.get(id(leaf), leaf), self._kwargs)
        self._tensors = [copies[id(tensor)] for tensor in self._tensors]
        forget()
        try:
            self.replay, self._outputs = recorded(lambda: forward(past_key_values=self._cache, **kwargs))
        except RuntimeError as error:
            raise RuntimeError(
                "generation: graph=True: the decoding step of this model cannot be recorded as a CUDA graph; leave it "
                "out"
            ) from error
        finally:
            forget()

    def __call__(self, step: _Step) -> Any:
        """The outputs of a step that `takes` says this is."""
        torch._foreach_copy_(self._tensors, step._tensors)
        self.replay()
        # The next token's would be written over them.
        return type(self._outputs)(
            **{name: value if value is self._cache else tree_map(_copy, value) for name, value in self._outputs.items()}
        )


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _check_cache(cache) -> None:
    from transformers.cache_utils import StaticLayer

    other = next((layer for layer in cache.layers if type(layer) is not StaticLayer), None)
    if other is not None:
        raise ValueError(
            "generation: graph=True needs transformers' static cache of layers that attend to all tokens, not "
            f"{type(other).__name__}: leave cache_implementation and past_key_values to it, or leave graph out"
        )

"""Which weights are stored as codes, found by module: while a model is made, and when an engine is.

Under zero.Init weights are stored while the model is still being made, because no rank may ever hold it in 16 bits. A
module does not know its name then, only those of what it contains. A weight is therefore judged by its name inside the
module two levels up ("self_attn.q_proj" in a decoder layer), which is complete early enough, and again by its full name
when the model is: what was stored wrongly (a name list may speak of "layers.0") gets its 16 or 32 bits back.
"""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Iterator

from torch import nn
from torch.nn import Parameter

from zeropp_fp8 import sharded
from zeropp_fp8.compute.convert import WRAPPED_BASES, linear_classes, routers
from zeropp_fp8.compute.experts import packed_experts
from zeropp_fp8.config import SECTION, ConfigError, FrozenConfig
from zeropp_fp8.config.compute import matches
from zeropp_fp8.formats import WireFormat
from zeropp_fp8.formats.shapes import is_stack, is_vector
from zeropp_fp8.zero.frozen.store import (
    name_stored,
    note_parametrized,
    note_version,
    store,
    store_format,
    stored_weight,
    unstore,
)

_LEVELS_ABOVE = 2  # modules that a weight's own must be in before it is judged while the model is being made


def _weights_of(module: nn.Module, frozen: FrozenConfig) -> list[Parameter]:
    """The parameters of a module itself that may be stored."""
    if sharded.holds_codes(module):
        return []
    if isinstance(frozen.modules, list):  # named by hand: whatever its class, as with the experts of a mixture
        found = module.parameters(recurse=False)
        return [] if isinstance(module, nn.Embedding) else [p for p in found if not is_vector(sharded.shape(p))]
    if isinstance(module, linear_classes()):
        return [module.weight] if isinstance(module.weight, Parameter) else []
    return packed_experts(module)


def is_chosen(name: str, frozen: FrozenConfig) -> bool:
    """Whether the weights of a linear layer of this name belong in the store."""
    if matches(name, frozen.skip_modules):
        return False
    return not isinstance(frozen.modules, list) or matches(name, frozen.modules)


def _candidates(root: nn.Module, frozen: FrozenConfig) -> Iterator[tuple[str, Parameter]]:
    """(name of its module, parameter) of what may be stored in `root`: nothing that PEFT adds, frozen or not."""
    wrapped: list[str] = []
    for name, module in root.named_modules():
        if any(base in module._modules for base in WRAPPED_BASES):
            wrapped.append(name + "." if name else "")
        around = [prefix for prefix in wrapped if name.startswith(prefix)]
        if around and not name[len(around[-1]) :].startswith(WRAPPED_BASES):
            continue
        for param in _weights_of(module, frozen):
            yield name, param


def _kept(root: nn.Module, frozen: FrozenConfig) -> set[int]:
    """id of weights that stay as they are: of embeddings, which a head may share, and of routers that are not named."""
    routing = set() if isinstance(frozen.modules, list) else routers(root)
    return {id(m.weight) for m in root.modules() if isinstance(m, nn.Embedding) or id(m) in routing}


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Inside zero.Init: new tensors have the dtype that they are asked for, not the model's."""
    context = sharded.under_construction()
    if context is None or not context.tensor_overrides:
        yield
        return
    context._remove_tensor_creation_wrappers()
    try:
        yield
    finally:
        context._add_tensor_creation_wrappers()


class StreamingStore:
    """Stores weights while a model is made under one zero.Init.

    With `frozen.modules` "frozen" only what needs no gradient by then is stored.
    """

    def __init__(self, frozen: FrozenConfig) -> None:
        self._frozen = frozen
        self._format = store_format(frozen)
        self._tops: dict[int, nn.Module] = {}  # finished modules that no finished module contains
        self._judged: set[int] = set()

    def module_finished(self, module: nn.Module) -> None:
        """A module's __init__ is over, and its parameters are partitioned. Collective."""
        for child in module.modules():
            self._tops.pop(id(child), None)
        self._tops[id(module)] = module
        kept = _kept(module, self._frozen)
        with _plain_tensors():
            for name, param in _candidates(module, self._frozen):
                if name.count(".") >= _LEVELS_ABOVE - 1 and id(param) not in self._judged:
                    self._judged.add(id(param))
                    if id(param) not in kept and is_chosen(name, self._frozen):
                        self._store(param)

    def model_finished(self) -> int:
        """Names are complete. Collective. Returns how many weights got 16 or 32 bits back from codes."""
        taken_back = 0
        for top in self._models():
            for param in top.parameters():
                note_version(param)  # writes so far were to empty tensors
            kept = _kept(top, self._frozen)
            for name, param in _candidates(top, self._frozen):
                if id(param) not in kept and is_chosen(name, self._frozen):
                    self._store(param)
                elif stored_weight(param) is not None:
                    unstore(param)
                    taken_back += 1
            name_stored(top.named_parameters())
        self._tops.clear()
        self._judged.clear()
        return taken_back

    def _models(self) -> list[nn.Module]:
        """The finished modules that no other contains now.

        A class whose __init__ is that of a mixin counts as finished before its layers are made (transformers'
        GenericForSequenceClassification).
        """
        inside = {id(child) for top in self._tops.values() for child in top.modules() if child is not top}
        return [top for key, top in self._tops.items() if key not in inside]

    def _store(self, param: Parameter) -> None:
        trained = self._frozen.modules == "frozen" and param.requires_grad
        if sharded.is_sharded(param) and stored_weight(param) is None and not trained:
            store(param, self._format)


def store_frozen(model: nn.Module, frozen: FrozenConfig, trains: bool, on_model: contextlib.ExitStack) -> None:
    """Store the frozen linear weights of a model whose engine is being made, as far as they are not. Collective.

    Args:
        trains: whether the engine has an optimizer. Without, everything is frozen.
        on_model: takes hooks off again.

    Raises:
        ConfigError: a weight to be trained is stored or named by "modules"; one was stored in another format; "modules"
            names none; there is nothing to store; or another engine has numbers of what would be stored.
    """
    wire_format = store_format(frozen)
    names = {param: name for name, param in model.named_parameters()}
    _check_stored(names, wire_format, trains)
    if wire_format is not None:
        for param in _to_store(model, names, frozen, trains):
            if stored_weight(param) is None:  # two layers may share one
                param.requires_grad_(False)
                store(param, wire_format)
        if frozen.modules != "frozen" and not any(stored_weight(param) for param in names):
            raise ConfigError(
                f'"{SECTION}.frozen.format": the model has no weight to store: no linear weight is frozen, or '
                '"frozen.skip_modules" names all of them; freeze the base model before the engine is made (PEFT does), '
                'or set "frozen.format" to "none", or "frozen.modules" to "frozen": to store what is frozen, if '
                "anything is"
            )
    name_stored((name, param) for param, name in names.items())
    _find_adapters(model)
    _expect_parametrizations(model, on_model)


def _check_stored(names: dict[Parameter, str], wire_format: WireFormat | None, trains: bool) -> None:
    """Refuse weights that were stored while the model was made and are to be trained, or were in another format."""
    for param, name in names.items():
        stored = stored_weight(param)
        if stored is None:
            continue
        if not trains:
            param.requires_grad_(False)
        if param.requires_grad:
            raise ConfigError(
                f'"{SECTION}.frozen": {name} is to be trained, but was stored as {stored.wire_format!r} codes while '
                'the model was made; freeze it (PEFT does), add its name to "frozen.skip_modules", or set '
                '"frozen.modules" to "frozen", so that only what is frozen is stored'
            )
        if wire_format is None or repr(stored.wire_format) != repr(wire_format):
            raise ConfigError(
                f'"{SECTION}.frozen": {name} was stored as {stored.wire_format!r} codes while the model was made, and '
                f"this engine asks for {'none' if wire_format is None else repr(wire_format)}; give both the same "
                "ds_config"
            )


def _to_store(model: nn.Module, names: dict[Parameter, str], frozen: FrozenConfig, trains: bool) -> list[Parameter]:
    """The weights that are still to be stored; refuses names that no weight or a trained one has."""
    named, kept = isinstance(frozen.modules, list), _kept(model, frozen)
    chosen = [p for n, p in _candidates(model, frozen) if id(p) not in kept and is_chosen(n, frozen)]
    if not chosen and named:
        raise ConfigError(
            f'"{SECTION}.frozen.modules": no weight of the model that may be stored has one of the names '
            f'{json.dumps(frozen.modules)}; correct them or "frozen.skip_modules", or set it to "all-linear"'
        )
    for param in chosen:
        if named and trains and param.requires_grad:
            raise ConfigError(
                f'"{SECTION}.frozen": {names[param]} is to be trained, and "frozen.modules" names it; freeze it, '
                'or add its name to "frozen.skip_modules"'
            )
    to_store = [p for p in chosen if stored_weight(p) is None and not (p.requires_grad and trains)]
    for param in to_store:
        if sharded.known(param).wire is not None:
            raise ConfigError(
                f'"{SECTION}.frozen.format": another engine over this model has {names[param]} as numbers, which '
                'would become codes; call its destroy() first, or set "frozen.format" to "none"'
            )
    return to_store


def _find_adapters(model: nn.Module) -> None:
    for holder in model.modules():
        for name, outermost in holder.named_children():
            layer, nested = outermost, "base_layer" in holder._modules
            while not nested and "base_layer" in layer._modules and hasattr(layer, "merged"):
                _adapted(layer, (weakref.ref(holder), name, weakref.ref(outermost)))
                layer = layer._modules["base_layer"]  # PEFT's layers of `target_parameters` are one inside the other


def _adapted(layer: nn.Module, place: tuple) -> None:
    """Tell the stored weights that a PEFT layer adapts: that of its name, or all of the layer that it is around."""
    for name, param in layer.get_base_layer().named_parameters(recurse=False):
        stored = stored_weight(param)
        if stored is None or getattr(layer, "parameter_name", name) != name:
            continue
        if stored.adapter is None or stored.adapter() is not layer:
            stored.before_merge, stored.holds_merged = None, layer.merged
        stored.adapter, stored.place = weakref.ref(layer), place


def _expect_parametrizations(model: nn.Module, on_model: contextlib.ExitStack) -> None:
    """Allow them for packed experts, whose adapters may come later, and for what PEFT adapts as a parameter."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            stored = stored_weight(param)
            adapter = stored and stored.adapter and stored.adapter()
            if stored is not None and (is_stack(sharded.shape(param)) or hasattr(adapter, "parameter_name")):
                hook = functools.partial(note_parametrized, name, param)
                on_model.callback(module.register_forward_pre_hook(hook).remove)

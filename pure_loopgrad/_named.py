"""A module and the names of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pure_loopgrad import _effects
from pure_loopgrad._training import Flags, Layers, flags_of
from pure_loopgrad.errors import LoopValueError

NamedTensors: TypeAlias = dict[str, Tensor]
_NORMS = {"torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm"}


@dataclass(frozen=True, eq=False)
class Named:
    """A module and the names of its tensors; a tensor with two names stands under one.

    Attributes:
        layers: the module and all below it.
        parameters: by name.
        places: where each buffer stands, as a layer and an attribute of it.
        slots: for every place that holds a tensor, the name under which the tensor stands here.
        empty: where a buffer is None, by name.
    """

    module: nn.Module
    layers: Layers
    parameters: NamedTensors
    places: dict[str, tuple[nn.Module, str]]
    slots: dict[str, str]
    empty: dict[str, tuple[nn.Module, str]]

    @classmethod
    def of(cls, module: nn.Module) -> Named:
        """Reads a module.

        `functional_call` ties tensors by itself, but then leaves a module that has one layer twice with the wrong
        tensors; so each layer is named once, and nothing is tied.
        """
        parameters: NamedTensors = {**dict(module.named_parameters())}
        name_of = {id(t): name for name, t in [*parameters.items(), *module.named_buffers()]}
        slots: dict[str, str] = {}
        places: dict[str, tuple[nn.Module, str]] = {}
        for prefix, layer in module.named_modules():
            own = dict(layer.named_buffers(recurse=False))
            for name, t in [*layer.named_parameters(recurse=False), *own.items()]:
                slots[f"{prefix}.{name}" if prefix else name] = name_of[id(t)]
            for name, t in own.items():
                places.setdefault(name_of[id(t)], (layer, name))
        empty = {
            f"{prefix}.{name}" if prefix else name: (layer, name)
            for prefix, layer in module.named_modules()
            for name, t in layer._buffers.items()  # named_buffers leaves them out
            if t is None
        }
        return cls(module, tuple(module.modules()), parameters, places, slots, empty)

    @property
    def buffers(self) -> NamedTensors:
        """What the module holds now: `module.to(...)` puts other tensors in their places."""
        # not by getattr, which looks among the parameters first and takes five times as long
        found = {name: layer._buffers.get(attribute) for name, (layer, attribute) in self.places.items()}
        return {name: t for name, t in found.items() if t is not None}

    def put(self, values: NamedTensors) -> None:
        """Has the module hold other tensors as its buffers."""
        for name, t in values.items():
            layer, attribute = self.places[name]
            setattr(layer, attribute, t)

    def call(self, params: NamedTensors, buffers: NamedTensors, x: Any) -> tuple[NamedTensors, Any]:
        """`module(x)` with these tensors in place of its own, and what its buffers are afterwards."""
        if not torch.compiler.is_compiling():
            _effects.note_mode(self.module, self.layers)
        tensors = {**params, **buffers}
        given = {slot: tensors[name] for slot, name in self.slots.items() if name in tensors}
        y = torch.func.functional_call(self.module, given, (x,), tie_weights=False)
        self._refuse_filled()
        # functional_call leaves in `given` what the module has put in the place of a tensor
        return {name: given[slot] for slot, name in self.slots.items() if name in buffers}, y

    def _refuse_filled(self) -> None:
        """A buffer that was None has nothing that a recomputation could start from."""
        for name, (layer, attribute) in self.empty.items():
            if layer._buffers.get(attribute) is not None:
                setattr(layer, attribute, None)
                raise LoopValueError(
                    f"the module puts a tensor into its buffer {name!r}, which is None{_effects.when()}. Register the "
                    f"buffer with a tensor, or call the module once before plg.from_module"
                )

    @property
    def flags(self) -> Flags:
        """Which layers are in train mode."""
        return flags_of(self.layers)

    @property
    def training(self) -> bool:
        """Whether a layer is in train mode, so that a call is expected to write into buffers, if there are some."""
        return bool(self.places) and any(self.flags)

    def running_statistics(self) -> set[str]:
        """Buffers that train mode writes and does not read, of layers in train mode."""
        return {
            name
            for name, (layer, _) in self.places.items()
            if layer.training and getattr(layer, "track_running_stats", False)
        }

    @property
    def norms(self) -> frozenset[str]:
        """The running statistics of torch's own layers, through which autograd has no derivative."""
        return frozenset(name for name, (layer, _) in self.places.items() if type(layer).__module__ in _NORMS)

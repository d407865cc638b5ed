"""The private corners of torch that cutting models stands on, in one place.

``tests/test_torch.py`` names the versions of torch that they were seen to work on. This module does
not know what they are for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "HOOKS",
    "REGISTRIES",
    "WRAPPERS_STATE",
    "as_fake",
    "autocast_state",
    "by_positions",
    "children",
    "copied_shell",
    "fake_mode",
    "forward_of",
    "fused_by",
    "has_backward_hooks",
    "has_forward_hooks",
    "has_no_forward",
    "in_function_forward",
    "is_data_dependent",
    "is_random",
    "is_sequential",
    "is_shared",
    "mutated_arguments",
    "registries",
    "run_uncompiled",
    "same_storage",
    "watched_hooks",
    "without_torch_function",
    "wrapper_subclass",
]

# Where a module keeps its hooks, and what is said of each.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)

# The registries of a module that its copy must not share.
REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *HOOKS)

# What FSDP2 and replicate keep on the modules that they wrap; a number of its own stands behind.
WRAPPERS_STATE = "__composable_api_state_key_"


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether calling ``module`` runs hooks beside its forward, in the forward or the backward."""
    return bool(module._forward_pre_hooks or module._forward_hooks or has_backward_hooks(module))


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a backward through ``module`` runs hooks of its own."""
    return bool(module._backward_pre_hooks or module._backward_hooks)


def forward_of(module: nn.Module) -> Any:
    """What calling ``module`` runs: a function of its own or of its class.

    Looked for in their dicts: some classes of torch.jit fail where they are asked for it.

    Example:
        >>> forward_of(nn.Identity()) is nn.Identity.forward
        True
    """
    owners = (module, *type(module).__mro__)
    return next(vars(owner)["forward"] for owner in owners if "forward" in vars(owner))


def is_sequential(module: nn.Module) -> bool:
    """Whether ``module`` runs its children one after the other, as ``nn.Sequential`` does.

    Example:
        >>> is_sequential(nn.ModuleList()), is_sequential(nn.Sequential())
        (False, True)
    """
    return forward_of(module) is nn.Sequential.forward


def has_no_forward(module: nn.Module) -> bool:
    """Whether ``module`` only holds others, as ``nn.ModuleList`` does, and can't be called.

    Example:
        >>> has_no_forward(nn.ModuleList()), has_no_forward(nn.Sequential())
        (True, False)
    """
    inherited: Any = nn.Module.forward
    return forward_of(module) is inherited


def registries(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own parameters, and its buffers."""
    return module._parameters, module._buffers


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The direct children by name; one that stands in several places, in each."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def copied_shell(module: nn.Module, cls: type[nn.Module] | None = None) -> nn.Module:
    """A module with the attributes of ``module``, whose registries can be changed apart from it.

    Args:
        module: the module to copy; its parameters, buffers and children are those of the copy.
        cls: the class of the copy; the module's own if None.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> copy = copied_shell(linear)
        >>> del copy.bias
        >>> copy.weight is linear.weight, linear.bias is None
        (True, False)
    """
    made: nn.Module = object.__new__(cls or type(module))
    attributes = dict(vars(module))
    for name in REGISTRIES:
        if name in attributes:
            attributes[name] = attributes[name].copy()
    object.__setattr__(made, "__dict__", attributes)
    return made


def fused_by(module: nn.Module) -> str | None:
    """What makes one thing of a module's forward, so that its copy would run the module itself.

    Example:
        >>> linear = nn.Linear(2, 2)
        >>> fused_by(linear) is None
        True
        >>> linear.compile(backend="eager")
        >>> fused_by(linear)
        'torch.compile'
    """
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    held = [value for value in vars(module).values() if callable(value)]
    compiled |= any(hasattr(value, "_torchdynamo_orig_callable") for value in held)
    if compiled or is_compiled(module):
        return "torch.compile"
    if isinstance(module, torch.jit.ScriptModule):
        return "torch.jit"
    return None


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` is what ``torch.compile`` makes of another one."""
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def run_uncompiled(copy: nn.Module) -> None:
    """Have a copied shell run its own children, where the module that it is of is compiled."""
    vars(copy)["_compiled_call_impl"] = None
    if is_compiled(copy):
        vars(copy)["forward"] = lambda *args, **kwargs: copy._modules["_orig_mod"](*args, **kwargs)  # type: ignore[misc]


def without_torch_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``func`` past ``__torch_function__``: operations reach ``__torch_dispatch__`` alone."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def is_shared(tensor: Tensor) -> bool:
    """Whether other tensors have the same memory.

    Example:
        >>> tensor = torch.zeros(2)
        >>> is_shared(tensor)
        False
        >>> other = tensor.detach()
        >>> is_shared(tensor)
        True
    """
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def wrapper_subclass(cls: Any, like: Tensor, device: torch.device) -> Any:
    """A tensor of class ``cls`` that has ``like``'s shape, strides and dtype, and no storage."""
    return Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )


def is_data_dependent(func: Any, args: Sequence[Any]) -> bool:
    """Whether a call of an operation of ATen needs values, if only for its result's shape."""
    if func is torch.ops.aten.index.Tensor:  # by positions the shape is known
        return any(is_mask(index) for index in args[1])
    return (
        torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    )


def is_mask(index: Any) -> bool:
    """Whether what a tensor is indexed by says of each element whether to take it."""
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def by_positions(func: Any, args: tuple[Any, ...], has_value: Callable[[Tensor], bool]) -> Any:
    """The arguments of a call of ATen, in which masks of known value have become positions.

    Example:
        >>> mask = torch.tensor([True, False, True])
        >>> index = torch.ops.aten.index.Tensor
        >>> by_positions(index, (torch.ones(3), [mask]), lambda tensor: True)[1]
        [tensor([0, 2])]
    """
    if func is not torch.ops.aten.index.Tensor:
        return args
    indices: list[Any] = []
    for index in args[1]:
        known = is_mask(index) and index.dim() > 0 and has_value(index)
        indices += index.nonzero().unbind(1) if known else [index]
    return (args[0], indices)


def is_random(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an operation of ATen draws random numbers; attention may do without."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            chance = args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(chance != 0)
    return True


def mutated_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operation of ATen writes into."""
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(argument.name)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if value is not None]


def fake_mode() -> Any:
    """Within it, tensors are of ``as_fake``'s kind: on a device by name, without values.

    On the meta device autocast does nothing; for such tensors it does what it does on theirs.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def as_fake(mode: Any, meta: Tensor, device: torch.device) -> Tensor:
    """A tensor without a value that claims to be on ``device``, like one on the meta device.

    Example:
        >>> mode = fake_mode()
        >>> fake = as_fake(mode, torch.ones(2, 2, device="meta"), torch.device("cpu"))
        >>> with mode, torch.autocast("cpu", dtype=torch.bfloat16):
        ...     (fake @ fake).dtype
        torch.bfloat16
    """
    from torch._subclasses.fake_tensor import FakeTensor

    made: Tensor = FakeTensor(mode, meta, device)
    return made


def autocast_state(device: torch.device) -> tuple[Any, ...]:
    """What autocast does now, on the CPU and on ``device``: equal where it does the same."""
    kinds = sorted({"cpu", device.type} - {"meta"})
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)
    )


# Told of hooks, by all that watch them now: one may begin within another.
_watchers: list[Callable[[str], None]] = []
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
# Of torch's own code, what looks at the graph in a user's stead.
_GRAPH = str(Path(torch.__file__).parent / "autograd" / "graph.py")


@contextmanager
def watched_hooks(told: Callable[[str], None]) -> Iterator[None]:
    """Tell of every tensor that gets a hook on its gradient, or shows its node of the graph.

    Hooks on nodes can't be seen, but who would put one there reads ``grad_fn`` first.

    Example:
        >>> with watched_hooks(print):
        ...     handle = torch.zeros(2, requires_grad=True).register_hook(print)
        registers a hook on a tensor
    """
    of: Any = Tensor
    if not _watchers:
        of.register_hook = _told_register_hook
        of.grad_fn = property(_told_grad_fn)
    _watchers.append(told)
    try:
        yield
    finally:
        _watchers.remove(told)
        if not _watchers:
            of.register_hook = _register_hook
            del of.grad_fn


_register_hook = Tensor.register_hook
_grad_fn: Any = torch._C.TensorBase.grad_fn


def _told_register_hook(tensor: Tensor, hook: Any) -> Any:
    for watcher in list(_watchers):
        watcher("registers a hook on a tensor")
    return _register_hook(tensor, hook)  # type: ignore[no-untyped-call]


def _told_grad_fn(tensor: Tensor) -> Any:
    frame: Any = sys._getframe(1)
    helps = frame.f_code.co_filename == _GRAPH
    while frame.f_code.co_filename == _GRAPH:
        frame = frame.f_back
    reader = frame.f_code.co_filename
    if not reader.startswith(_OURS if helps else (_TORCH, _OURS)):
        for watcher in list(_watchers):
            watcher("reads a tensor's grad_fn")
    return _grad_fn.__get__(tensor)


def in_function_forward() -> bool:
    """Whether this library is called within the forward of an autograd function of others.

    Such a function makes a graph of its own in its backward, or none.

    Example:
        >>> in_function_forward()
        False
    """
    frame: Any = sys._getframe(1)
    ours = True
    while frame is not None:
        was, ours = ours, frame.f_code.co_filename.startswith(_OURS)
        if ours and not was:
            return False  # what runs around the call of the model's code is no part of it
        first = next(iter(frame.f_code.co_varnames), "")
        if isinstance(frame.f_locals.get(first), torch.autograd.function.FunctionCtx):
            return True
        frame = frame.f_back
    return False


def same_storage(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors share memory; on the meta device, where there is none, whether they
    would."""
    return bool(left.untyped_storage()._cdata == right.untyped_storage()._cdata)

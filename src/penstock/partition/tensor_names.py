"""The names that a model has for its parameters and buffers: tied ones have several."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["names_by_tensor", "named_tensors"]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, then all buffers, each under every name that it has."""
    params = model.named_parameters(remove_duplicate=False)
    return {**dict(params), **dict(model.named_buffers(remove_duplicate=False))}


def names_by_tensor(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """For each parameter and buffer, by id, all its names, in the order of the model's tree.

    Example:
        >>> shared = nn.Linear(1, 1, bias=False)
        >>> list(names_by_tensor(nn.Sequential(shared, shared)).values())
        [('0.weight', '1.weight')]
    """
    found: dict[int, tuple[str, ...]] = {}
    for name, tensor in named_tensors(model).items():
        found[id(tensor)] = (*found.get(id(tensor), ()), name)
    return found

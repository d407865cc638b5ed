"""Deferral of weight gradients by operation: I computes the inputs' gradients, W the weights'."""

from penstock.stage.weight_grad import ops  # registers the handlers of operations
from penstock.stage.weight_grad.accumulate import CannotDeferError, refuse
from penstock.stage.weight_grad.deferred_grads import DeferredGrads, compiled_parts, find_undeferred

__all__ = ["CannotDeferError", "DeferredGrads", "compiled_parts", "find_undeferred", "ops"]
__all__ += ["refuse"]

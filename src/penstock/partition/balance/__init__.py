"""Costs of a model's blocks, and the split with the least bottleneck."""

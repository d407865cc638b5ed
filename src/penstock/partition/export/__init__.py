"""Capture a model as a graph by torch.export, and cut the graph into stages."""

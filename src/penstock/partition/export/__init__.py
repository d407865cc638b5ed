"""Trace a model as a graph (torch.export, torch.fx), and cut the graph into stages."""

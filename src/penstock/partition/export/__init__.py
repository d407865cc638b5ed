"""A model traced as a graph (torch.export, torch.fx), and the graph cut into stages."""

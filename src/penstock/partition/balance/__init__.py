"""What the parts of a model cost, and the cuts that make the slowest stage fastest."""

"""Search for the best program under given costs and memory limits, with a lower bound."""

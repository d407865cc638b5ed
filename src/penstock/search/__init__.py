"""The best program for given costs and memory, and a bound beside it that none can beat."""

"""From a model to its stages."""

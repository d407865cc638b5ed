"""Cut a model into the stages of a pipeline."""

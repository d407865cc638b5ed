"""A module and its autograd state: one stage of a pipeline."""

"""Public helpers for tests of pipelines."""

"""What surrounds a stage: data parallelism, shared parameters, gradient clipping."""

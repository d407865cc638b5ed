"""Around a stage: data parallelism, shared parameters, gradient clipping."""

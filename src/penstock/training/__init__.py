"""Around a pipelined step: checkpoints, state dicts, gradient clipping."""

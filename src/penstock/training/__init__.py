"""What a training loop needs around a pipelined step."""

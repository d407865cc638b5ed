"""Weight gradients put off from I to W, operation by operation."""

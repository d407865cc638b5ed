"""The hand-driven stage API of torch.distributed.pipelining, over Penstock's stages."""

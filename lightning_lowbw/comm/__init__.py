"""Collectives on torch.distributed process groups, what they cost, and agreement between ranks. No Lightning."""

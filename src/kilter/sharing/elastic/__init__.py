"""Data ratios of a running job on torch.distributed: uneven shards, exactly weighted gradients, and
ranks that leave and come back."""

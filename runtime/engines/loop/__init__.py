"""The step loop that engines share: requests in, batches through the model, deltas out."""

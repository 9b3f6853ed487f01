"""An engine without a model that takes the time, and keeps the blocks, of one with a GPU."""

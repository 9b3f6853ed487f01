"""The multiplexed carrier: one connection, a link, for all streams between two processes."""

"""What stands in discovery: instances, leases, model cards, addresses; and which instance is chosen."""

"""Who gets in: bounds, and those who wait for a place under them."""

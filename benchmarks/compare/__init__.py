"""Train methods with the same budget, and compare them."""

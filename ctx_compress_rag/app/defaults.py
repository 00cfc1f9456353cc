"""What the command line takes where nothing is said: the shipped bundles' names, and where an index is kept."""

ENGLISH = "smollm2-135m"
INVENTED = "demo"
"""Reads the invented world alone, which examples and tests are made of."""

STORE = "chroma"

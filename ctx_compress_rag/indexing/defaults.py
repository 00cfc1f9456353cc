"""Defaults of the command line: the shipped bundles' names, and the folder of an index."""

ENGLISH = "smollm2-135m"
INVENTED = "demo"
"""Reads only the invented world, which examples and tests use."""

STORE = "chroma"

"""What the commands run: from files to an index, questions about it, and the demo."""

DEFAULT_BUNDLE = "smollm2-135m"
"""The shipped bundle that reads English."""

"""From a prompt with soft contexts to text."""

"""Turn prompts with soft contexts into text."""

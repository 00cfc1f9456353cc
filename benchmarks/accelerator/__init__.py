"""All that needs an accelerator, by one command."""

"""What turns prompts into answers: one module for each way."""

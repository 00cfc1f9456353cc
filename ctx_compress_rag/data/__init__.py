"""Data to train on and to score with: questions about passages, or plain text."""

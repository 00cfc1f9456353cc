"""What only some stages of training need."""

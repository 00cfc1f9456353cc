"""Examples and texts to train on and to score with."""

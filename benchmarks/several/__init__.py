"""Several passages in one prompt: data whose distractors are near neighbors, and ways to train on them, tried."""

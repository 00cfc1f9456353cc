"""The losses for training adaptations."""

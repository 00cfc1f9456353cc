"""Methods trained with the same budget, and compared."""

"""How long things take, and what they cost."""

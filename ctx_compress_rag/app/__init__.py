"""What the command line keeps in a folder: an index, its passages, answers and the demo."""

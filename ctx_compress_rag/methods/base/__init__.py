"""What methods are made of: a compressor, a reader, and the weights they share."""

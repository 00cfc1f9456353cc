"""The parts of a method: a compressor, a reader, and the weights they share."""

"""What all compression methods share: the base classes of compressors and readers, and their settings."""

"""Other projects' published compressors, converted into bundles: a module per format."""

"""Convert other projects' published compressors into bundles, with a module for each format."""

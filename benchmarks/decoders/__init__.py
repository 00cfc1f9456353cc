"""Every decoder-only type of the installed transformers, tiny, through all of the library's ways."""

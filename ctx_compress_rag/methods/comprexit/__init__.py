"""ComprExIT."""

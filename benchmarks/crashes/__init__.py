"""The crash laboratory: stores whose processes are killed, crowd one folder, or find its files damaged."""

"""ArcAligner."""

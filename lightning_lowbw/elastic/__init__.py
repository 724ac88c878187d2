"""Local SGD whose groups of ranks come, go and are slow."""

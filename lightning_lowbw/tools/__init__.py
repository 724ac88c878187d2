"""The commands beside `lowbw-train`, and small tasks to train. The core of the package does not import them."""

"""The commands beside `lowbw-train`, and small tasks to train. The rest of the package imports none of it."""

"""Methods, combined from when, what and where; independent of Lightning."""

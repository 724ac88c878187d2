"""Methods: when, what and where put together, with and without Lightning."""

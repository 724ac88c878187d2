"""When the ranks communicate: schedules as values."""

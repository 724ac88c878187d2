"""When the ranks talk: schedules as values."""

"""Lightning callbacks: schedules for strategies given by name."""

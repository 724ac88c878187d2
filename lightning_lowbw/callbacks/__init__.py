"""Lightning callbacks: schedules for strategies given by name, and a monitor of the traffic."""

"""Lightning callbacks: what a strategy given by name cannot be told, and what it has to tell."""

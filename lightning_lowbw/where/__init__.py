"""Who talks to whom: topology, collectives and what they cost."""

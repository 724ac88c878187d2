"""Who communicates with whom: topology, collectives and their volume."""

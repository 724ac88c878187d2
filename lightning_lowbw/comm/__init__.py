"""Communication between ranks: topology, collectives and their volume."""

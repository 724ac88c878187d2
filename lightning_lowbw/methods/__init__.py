"""One file per method: the mathematics of core connected to the collectives of comm. They work without Lightning."""

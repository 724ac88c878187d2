"""Pure parts of the methods: schedules, selection, wire codecs, volume formulas. No communication, no Lightning."""

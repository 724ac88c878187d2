"""Payloads, corrections and wire formats: the content of messages, which go through `comm.peers`."""

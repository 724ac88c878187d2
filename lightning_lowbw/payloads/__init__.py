"""Payloads, corrections and wire formats: the content of messages. Nothing here communicates."""

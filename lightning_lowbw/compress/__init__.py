"""What is sent: payloads, corrections and the wire formats; nothing here communicates."""

"""Methods measured: on the classic MIL sets, and by time and memory."""

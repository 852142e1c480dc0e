"""What a run wrote, read as what it means."""

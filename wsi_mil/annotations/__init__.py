"""What people drew on slides: outlines read from their files, and the lesions they make."""

"""`wsi-mil check`: what a file or folder is, and what is wrong with it."""

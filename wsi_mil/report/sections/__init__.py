"""Sections of the page: each is a file that turns findings into words and numbers, and a template of the same name."""

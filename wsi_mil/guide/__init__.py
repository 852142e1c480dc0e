"""What methods, plug-ins and encoders say of themselves, put into words: `wsi-mil list` and docs/methods.md. Pure.

Nothing about a single method is written here; only the words that help to choose between them.
"""

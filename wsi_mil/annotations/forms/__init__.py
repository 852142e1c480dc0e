"""How other programs write outlines down: one file a form, each from parsed text to layers. No files, no geometry."""

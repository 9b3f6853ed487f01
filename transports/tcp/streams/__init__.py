"""The tcp response plane: workers call home and stream."""

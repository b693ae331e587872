"""What a program holds: a loaded model, a gallery that knows its model, and the answers of a search."""

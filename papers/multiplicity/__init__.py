"""How many images people find for a caption, and how well a search by it does: estimates from the caption alone."""

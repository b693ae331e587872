"""What a model is and does: recipes, building, run folders, embedding, calibration, export. Nothing here trains."""

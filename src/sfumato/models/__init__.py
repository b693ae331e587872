"""Models without training: recipes, building, run folders, embedding, calibration and export."""

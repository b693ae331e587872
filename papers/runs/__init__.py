"""Runs compared: tables with paired tests, grids, retrieval strategies, and published figures beside the own ones."""

"""Pages, plots and console tables about a model; the templates lie beside them."""

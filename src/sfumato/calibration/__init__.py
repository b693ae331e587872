"""From distances to probabilities that hold: Platt scaling, isotonic regression, abstention and conformal sets."""

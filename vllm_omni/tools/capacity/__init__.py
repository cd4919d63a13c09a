"""How much hardware a number of viewers takes: formulas, and a simulation that they are held to."""

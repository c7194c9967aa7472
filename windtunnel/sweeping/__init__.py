"""What-if over any settings: a sweep of simulations with replications, and which setting matters most."""

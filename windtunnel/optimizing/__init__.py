"""A constrained search over the settings of a deployment for goodput per dollar, with the answer explained."""

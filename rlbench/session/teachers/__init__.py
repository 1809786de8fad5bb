"""Teachers: frozen policies that say how likely they find what was sampled."""

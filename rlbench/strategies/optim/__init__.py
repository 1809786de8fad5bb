"""Optimizers: groups, master weights, loss scale, gradients."""

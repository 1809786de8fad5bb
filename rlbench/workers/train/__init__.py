"""A training rank: an actor with a module and its optimizers."""

"""One forward or backward pass: packing, attention, log-probs, micro-batches."""

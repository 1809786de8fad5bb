"""Steps, syncs, evaluation, trainers."""

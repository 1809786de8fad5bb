"""Trainers of texts: demonstrations, pairs and judged responses through the one policy update."""

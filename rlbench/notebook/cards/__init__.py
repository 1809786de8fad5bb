"""The card each value shows at the end of a cell."""

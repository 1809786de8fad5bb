"""What every view shares: escaped markup, colours, units."""

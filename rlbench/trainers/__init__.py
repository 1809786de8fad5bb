"""What a whole recipe does on the ranks. Import the submodules: this package itself imports no torch."""

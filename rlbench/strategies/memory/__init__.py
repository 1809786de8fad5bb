"""Where parameters and optimizer states lie, and how much memory they take."""

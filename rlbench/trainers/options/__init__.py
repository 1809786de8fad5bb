"""The options of a run, by keyword, file and command line."""

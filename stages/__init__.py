"""The stages of the work, each independent of the order of a command."""

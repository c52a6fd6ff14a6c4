"""Reads files of preference data into encoded rows, in bounded memory."""

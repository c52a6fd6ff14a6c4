"""Files of preference data to encoded rows, in bounded memory."""

"""Hunt: models that people write themselves, each of which was trained wrong without a word once."""

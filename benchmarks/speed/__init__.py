"""Speed: the same training work by pipeshard and by its peers, measured in turns, beside the schedule's limit."""

"""Speed: the same training steps with pipeshard and its peers, timed in turns and compared with a schedule's limit."""

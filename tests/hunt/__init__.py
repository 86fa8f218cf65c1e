"""Hunt: models as users write them, each of which once trained silently wrong."""

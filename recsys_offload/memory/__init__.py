"""What the cache's size and policy are worth, found from the data alone."""

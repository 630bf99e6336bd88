"""What engines share: the grouping of tokens and the combination of results around their products."""

"""Where the weights of a model come from: files, or a random generator."""
